// Calls of the native API. Every failure becomes an ApiError that a person can read.

import { authorization, wantKey } from "./key";
import type { ForkResult, Page, Restored, Session, TokenRange, Turn } from "./types";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    /** Where in the request the fault is, e.g. "body.at", with what is wrong there. */
    readonly fields: { location: string; message: string }[] = [],
  ) {
    super(message);
    this.name = "ApiError";
  }
}

interface Problem {
  title?: string;
  detail?: string;
  code?: string;
  errors?: { location?: string; message?: string }[];
}

/** Turns an answer that is not 2xx into an ApiError; the body need not be problem+json. */
export function problemError(status: number, body: string): ApiError {
  let problem: Problem = {};
  try {
    const parsed: unknown = JSON.parse(body);
    if (parsed && typeof parsed === "object") problem = parsed as Problem;
  } catch {
    // Not JSON: a proxy's page, perhaps. The status is all there is to tell.
  }
  const fields = (problem.errors ?? [])
    .filter((e) => e.message)
    .map((e) => ({ location: e.location ?? "", message: e.message ?? "" }));
  const message = problem.detail || problem.title || `the server answered ${status}`;
  return new ApiError(status, problem.code ?? "", message, fields);
}

/** An error as a person reads it: one sentence, and what is wrong with each field. */
export function inWords(err: unknown): { text: string; details: string[] } {
  if (err instanceof ApiError) {
    // The server's one-field errors say the field in the sentence already.
    const told = (m: string) => err.fields.length === 1 && err.message.includes(m);
    const details = err.fields
      .filter((f) => !told(f.message))
      .map((f) => (f.location ? `${f.location}: ${f.message}` : f.message));
    return { text: err.message, details };
  }
  return { text: err instanceof Error ? err.message : String(err), details: [] };
}

async function call<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  const headers: Record<string, string> = { Accept: "application/json", ...authorization() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET") headers["Idempotency-Key"] = crypto.randomUUID();
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (err) {
    if (err instanceof DOMException && err.name === "AbortError") throw err;
    throw new ApiError(0, "unreachable", "the server cannot be reached");
  }
  if (response.status === 401) wantKey();
  const text = await response.text();
  if (!response.ok) throw problemError(response.status, text);
  return (text ? JSON.parse(text) : undefined) as T;
}

const session = (id: string, rest = "") => `/v1/sessions/${encodeURIComponent(id)}${rest}`;

export interface CreateBody {
  title?: string;
  input?: string;
  messages?: { role: string; content: string }[];
}

export interface TurnBody extends Omit<CreateBody, "title"> {
  max_tokens?: number;
  temperature?: number;
  seed?: number;
  ignore_eos?: boolean;
}

export const api = {
  list: (limit: number, after?: string | null) =>
    call<Page<Session>>("GET", `/v1/sessions?limit=${limit}${after ? `&after=${encodeURIComponent(after)}` : ""}`),
  get: (id: string) => call<Session>("GET", session(id)),
  create: (body: CreateBody) => call<Session>("POST", "/v1/sessions", body),
  rename: (id: string, title: string) => call<Session>("PATCH", session(id), { title }),
  remove: (id: string) => call<void>("DELETE", session(id)),
  close: (id: string) => call<Session>("POST", session(id, "/close")),
  cancel: (id: string) => call<Turn>("POST", session(id, "/cancel")),
  detach: (id: string, tier: "host" | "disk") => call<Session>("POST", session(id, "/detach"), { tier }),
  resume: (id: string) => call<Session & { restored: Restored }>("POST", session(id, "/resume")),
  fork: (id: string, body: { at?: number; n?: number; title?: string }) =>
    call<ForkResult>("POST", session(id, "/fork"), body),
  turn: (id: string, body: TurnBody) => call<Turn>("POST", session(id, "/turns"), body),
  turns: (id: string, limit: number) => call<Page<Turn>>("GET", session(id, `/turns?limit=${limit}`)),
  turnOf: (id: string, turn: string) => call<Turn>("GET", session(id, `/turns/${encodeURIComponent(turn)}`)),
  tokens: (id: string, from: number, to: number, signal?: AbortSignal) =>
    call<TokenRange>("GET", session(id, `/tokens?from=${from}&to=${to}&pieces=true`), undefined, signal),
  version: () => call<{ version?: string }>("GET", "/version"),
};
