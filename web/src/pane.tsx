// The selected session: what it is, its text, and what can be done with it.

import { useEffect, useState } from "preact/hooks";
import { cancelTurn, closeSession, deleteSession, detachSession, forkSession, renameSession, resumeSession } from "./actions";
import { Composer } from "./composer";
import { ConfirmDialog, PromptDialog } from "./dialogs";
import type { Follower } from "./follower";
import { label } from "./forest";
import { grouped } from "./painter";
import { follower, forest, notify, treeVersion } from "./store";
import { Transcript } from "./transcript";
import type { Session, Usage } from "./types";

const childrenMax = 64; // the API's

export function Pane() {
  const current = follower.value;
  treeVersion.value; // the session's fields live in the forest
  const session = current ? forest.get(current.id) : null;
  if (!current || !session) {
    return (
      <section class="pane empty-pane" aria-label="Session">
        <p>{current ? "Opening the session…" : "Select a session to see its text, talk to it and fork it."}</p>
      </section>
    );
  }
  return <SessionPane key={current.id} follower={current} session={session} />;
}

function SessionPane({ follower, session }: { follower: Follower; session: Session }) {
  const [at, setAt] = useState<number | null>(null);
  follower.version.value; // the line's phase is not a signal of its own
  const running = follower.line.phase === "running" || session.state === "running";
  return (
    <section class="pane" aria-label="Session">
      <Head session={session} running={running} />
      <div class="pane-bar">
        <Progress follower={follower} running={running} />
      </div>
      <Transcript follower={follower} picked={at} onPick={setAt} />
      <ForkBar session={session} at={at} onAt={setAt} end={follower.line.cursor ?? session.length} />
      <Composer session={session} running={running} />
    </section>
  );
}

function Head({ session, running }: { session: Session; running: boolean }) {
  const [ask, setAsk] = useState<"close" | "delete" | "rename" | null>(null);
  const [busy, setBusy] = useState(false);
  const closed = session.state === "closed";
  const act = (work: Promise<boolean>) => {
    setBusy(true);
    void work.finally(() => setBusy(false));
  };
  const copy = () =>
    navigator.clipboard.writeText(session.id).then(
      () => notify("info", `Copied ${session.id}`),
      () => notify("error", "The browser did not allow copying"),
    );
  return (
    <header class="pane-head">
      <div class="pane-title">
        <h2>{label(session.id, session)}</h2>
        <span class={`badge ${session.state}`}>
          <i class={`dot ${session.state}`} aria-hidden="true" />
          {session.state}
        </span>
      </div>
      <div class="pane-facts">
        <button type="button" class="link mono" onClick={() => void copy()} title="Copy the id">
          {session.id}
        </button>
        <span>
          {grouped(session.length)} tokens · {session.turn_count === 1 ? "1 turn" : `${grouped(session.turn_count)} turns`}
          {session.forked_at !== null && ` · forked at ${grouped(session.forked_at)}`}
          {` · ${session.model}`}
        </span>
      </div>
      {Object.keys(session.labels).length > 0 && (
        <div class="labels">
          {Object.entries(session.labels).map(([k, v]) => (
            <span key={k} class="label">{v ? `${k}=${v}` : k}</span>
          ))}
        </div>
      )}
      <Residency session={session} />
      <div class="actions" role="group" aria-label="Session actions">
        {running && (
          <button type="button" class="primary" disabled={busy} onClick={() => act(cancelTurn(session.id))}>
            Cancel
          </button>
        )}
        {session.state === "detached" ? (
          <button type="button" disabled={busy} onClick={() => act(resumeSession(session.id))}>
            Resume
          </button>
        ) : (
          <button
            type="button"
            disabled={busy || running || closed}
            onClick={() => act(detachSession(session.id))}
            title="Move its state off the device; it comes back without recomputing"
          >
            Detach
          </button>
        )}
        <button type="button" disabled={busy} onClick={() => setAsk("rename")}>
          Rename
        </button>
        <button type="button" disabled={busy || closed} onClick={() => setAsk("close")}>
          Close
        </button>
        <button type="button" class="danger" disabled={busy} onClick={() => setAsk("delete")}>
          Delete
        </button>
      </div>
      {ask === "rename" && (
        <PromptDialog
          title="Rename session"
          label="Title"
          value={session.title}
          confirm="Rename"
          onClose={() => setAsk(null)}
          onConfirm={(title) => act(renameSession(session.id, title))}
        />
      )}
      {ask === "close" && (
        <ConfirmDialog
          title="Close this session?"
          text="It stays readable, but takes no more turns and no forks. This cannot be undone."
          confirm="Close session"
          onClose={() => setAsk(null)}
          onConfirm={() => act(closeSession(session.id))}
        />
      )}
      {ask === "delete" && (
        <ConfirmDialog
          title="Delete this session?"
          text="Its own text goes at once, except what its forks still need. This cannot be undone."
          confirm="Delete session"
          onClose={() => setAsk(null)}
          onConfirm={() => act(deleteSession(session.id))}
        />
      )}
    </header>
  );
}

function Residency({ session }: { session: Session }) {
  const { device, host, disk, snapshots } = session.residency;
  const share = (n: number) => `${session.length > 0 ? Math.min(100, (100 * n) / session.length) : 0}%`;
  return (
    <div class="residency">
      <div class="residency-bar" aria-hidden="true">
        <i class="device" style={{ width: share(device) }} />
        <i class="host" style={{ width: share(host) }} />
        <i class="disk" style={{ width: share(disk) }} />
      </div>
      <span>
        device {grouped(device)} · host {grouped(host)} · disk {grouped(disk)} · {snapshots === 1 ? "1 snapshot" : `${grouped(snapshots)} snapshots`}
      </span>
    </div>
  );
}

const millis = (ms: number) => (ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`);

function summary(u: Usage): string {
  return [
    `${grouped(u.completion_tokens)} tokens`,
    `${u.tokens_per_second.toFixed(1)} tok/s`,
    `first after ${millis(u.ttft_ms)}`,
    `${grouped(u.cached_tokens)} cached`,
  ].join(" · ");
}

/** How the turn goes, said politely when it changes; the text itself is not read out token by token. */
function Progress({ follower, running }: { follower: Follower; running: boolean }) {
  // A component that reads a signal is drawn anew by its own signals and properties only, not with its parent.
  follower.version.value;
  const { line } = follower;
  const lost = follower.state.value === "lost";
  return (
    <span class="progress">
      <span role="status">
        {lost ? "reconnecting…" : running ? "generating…" : line.error ? `failed: ${line.error}` : line.ended ? `ended: ${line.ended.replace(/_/g, " ")}` : ""}
      </span>
      {!running && line.usage && <span> · {summary(line.usage)}</span>}
    </span>
  );
}

interface ForkBarProps {
  session: Session;
  at: number | null;
  onAt: (at: number | null) => void;
  end: number;
}

function ForkBar({ session, at, onAt, end }: ForkBarProps) {
  const [count, setCount] = useState(1);
  const [busy, setBusy] = useState(false);
  useEffect(() => setBusy(false), [session.id]);
  return (
    <form
      class="fork-bar"
      aria-label="Fork"
      onSubmit={(e) => {
        e.preventDefault();
        setBusy(true);
        void forkSession(session.id, at, count).then((ok) => {
          setBusy(false);
          if (ok) onAt(null);
        });
      }}
    >
      <label>
        Fork at
        <input
          type="number"
          min={0}
          max={end}
          step={1}
          placeholder={`end (${grouped(end)})`}
          value={at ?? ""}
          onInput={(e) => onAt(e.currentTarget.value === "" ? null : e.currentTarget.valueAsNumber)}
        />
      </label>
      <label>
        children
        <input type="number" class="small" min={1} max={childrenMax} step={1} required value={count} onInput={(e) => setCount(e.currentTarget.valueAsNumber || 1)} />
      </label>
      <button type="submit" disabled={busy || session.state === "closed"}>
        Fork
      </button>
      <span class="hint">{at === null ? "or click a token" : `keeps ${grouped(at)}`}</span>
    </form>
  );
}
