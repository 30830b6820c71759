// What a person can do to sessions. Each call reports its own failure; true means that it worked.

import { api, type CreateBody, type TurnBody } from "./api";
import { label } from "./forest";
import { forest, gone, notify, put, refresh, report, select } from "./store";

async function attempt(doing: string, work: () => Promise<void>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (err) {
    report(err, doing);
    return false;
  }
}

const name = (id: string) => label(id, forest.get(id));

/** Rejects on failure: the dialog that asks shows it itself, since notices lie behind it. */
export async function createSession(body: CreateBody): Promise<void> {
  const session = await api.create(body);
  put(session);
  select(session.id);
}

export const sendTurn = (id: string, body: TurnBody) =>
  attempt("Send", async () => {
    await api.turn(id, body);
    refresh(id);
  });

export const cancelTurn = (id: string) => attempt("Cancel", async () => void (await api.cancel(id)));

export const forkSession = (id: string, at: number | null, n: number) =>
  attempt("Fork", async () => {
    const result = await api.fork(id, { ...(at === null ? {} : { at }), n });
    for (const child of result.sessions) put(child);
    refresh(id);
    const children = n === 1 ? "1 child" : `${n} children`;
    notify("info", `${children} at token ${result.at}: ${result.shared_tokens} tokens shared, ${result.replay_tokens} to replay`);
    if (n === 1 && result.sessions[0]) select(result.sessions[0].id);
  });

export const detachSession = (id: string) => attempt("Detach", async () => put(await api.detach(id, "host")));

export const resumeSession = (id: string) =>
  attempt("Resume", async () => {
    const { restored, ...session } = await api.resume(id);
    put(session);
    notify(
      "info",
      `${name(id)} is back: ${restored.device} tokens from the device, ${restored.host} from the host, ${restored.disk} from disk, ${restored.recomputed} recomputed`,
    );
  });

export const closeSession = (id: string) => attempt("Close", async () => put(await api.close(id)));

export const deleteSession = (id: string) =>
  attempt("Delete", async () => {
    const called = name(id);
    await api.remove(id);
    gone(id);
    notify("info", `Deleted ${called}`);
  });

export const renameSession = (id: string, title: string) => attempt("Rename", async () => put(await api.rename(id, title)));
