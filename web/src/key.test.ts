import { afterEach, expect, test } from "vitest";
import { apiKey, authorization, keepKey, keyWanted, protocols } from "./key";

afterEach(() => keepKey(""));

test("without a key nothing is sent", () => {
  expect(authorization()).toEqual({});
  expect(protocols()).toEqual(["rocket.v1"]);
});

test("a key goes into the header and the protocols, and out of both again", () => {
  keyWanted.value = true;
  keepKey("rk_ABC");
  expect(keyWanted.value).toBe(false);
  expect(apiKey.value).toBe("rk_ABC");
  expect(authorization()).toEqual({ Authorization: "Bearer rk_ABC" });
  expect(protocols()).toEqual(["rocket.v1", "rocket.key.rk_ABC"]);
  keepKey("");
  expect(authorization()).toEqual({});
});
