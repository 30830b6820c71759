// What the form of a turn asks for, as a request. Pure.

import type { TurnBody } from "./api";

export type Mode = "chat" | "raw";

export interface TurnFields {
  mode: Mode;
  text: string;
  maxTokens: string;
  temperature: string;
  seed: string;
  ignoreEos: boolean;
}

/** The request that the form's fields say; empty ones are left to the server's defaults. */
export function turnBody(fields: TurnFields): TurnBody {
  const body: TurnBody = {};
  if (fields.text !== "") {
    if (fields.mode === "chat") body.messages = [{ role: "user", content: fields.text }];
    else body.input = fields.text;
  }
  if (fields.maxTokens !== "") body.max_tokens = Number(fields.maxTokens);
  if (fields.temperature !== "") body.temperature = Number(fields.temperature);
  if (fields.seed !== "") body.seed = Number(fields.seed);
  if (fields.ignoreEos) body.ignore_eos = true;
  return body;
}
