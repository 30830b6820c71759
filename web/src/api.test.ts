import { expect, test } from "vitest";
import { inWords, problemError } from "./api";
import { turnBody } from "./turn";
import { backoff } from "./socket";

test("problem+json becomes a sentence and its fields", () => {
  const err = problemError(
    422,
    JSON.stringify({ title: "Unprocessable Entity", detail: "validation failed", code: "invalid", errors: [{ location: "body.at", message: "expected number >= 0" }] }),
  );
  expect([err.status, err.code]).toEqual([422, "invalid"]);
  expect(inWords(err)).toEqual({ text: "validation failed", details: ["body.at: expected number >= 0"] });
});

test("a field that the sentence tells already is not told twice", () => {
  const err = problemError(422, JSON.stringify({ detail: "at: past the end", errors: [{ location: "at", message: "past the end" }] }));
  expect(inWords(err).details).toEqual([]);
});

test("an answer that is no problem+json tells its status", () => {
  for (const body of ["", "<html>Bad gateway</html>", "null", "42", "[]"]) {
    expect(inWords(problemError(502, body)).text).toBe("the server answered 502");
  }
});

test("a turn's request holds what was filled in and nothing else", () => {
  const empty = { mode: "raw", text: "", maxTokens: "", temperature: "", seed: "", ignoreEos: false } as const;
  expect(turnBody(empty)).toEqual({});
  expect(turnBody({ ...empty, text: "x", maxTokens: "5", temperature: "0", seed: "7", ignoreEos: true })).toEqual({
    input: "x",
    max_tokens: 5,
    temperature: 0,
    seed: 7,
    ignore_eos: true,
  });
  expect(turnBody({ ...empty, mode: "chat", text: "hi" })).toEqual({ messages: [{ role: "user", content: "hi" }] });
});

test("waits grow, are spread out and end at five seconds", () => {
  expect(backoff(0, 0)).toBe(100);
  expect(backoff(0, 1)).toBe(200);
  expect(backoff(3, 1)).toBe(1600);
  expect(backoff(100, 1)).toBe(5000);
});
