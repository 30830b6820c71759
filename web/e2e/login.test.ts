// The dashboard of a server that wants API keys.

import type { BrowserContext } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { openBrowser, openPage } from "./browser";
import { Server } from "./server";

let server: Server;
let context: BrowserContext;

beforeAll(async () => {
  server = await Server.start("--auth", "required", "--log-level", "debug");
  context = await openBrowser();
});
afterAll(async () => {
  await context?.close();
  await server?.stop();
});

test("asks for a key, keeps it for the tab, and shows that tenant's sessions only", async () => {
  const [mine, theirs] = [server.key("mine"), server.key("theirs")];
  for (const [key, title] of [[mine, "of mine"], [theirs, "of theirs"]] as const) {
    const made = await fetch(`${server.url}/v1/sessions`, {
      method: "POST",
      headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" },
      body: JSON.stringify({ title, input: "func main() {" }),
    });
    expect(made.status).toBe(201);
  }
  const { page, faults } = await openPage(context, server.url + "/", "dialog");
  const dialog = page.getByRole("dialog", { name: "API key" });
  await dialog.getByLabel("Key").fill("rk_NOTAKEY");
  await dialog.getByRole("button", { name: "Open" }).click();
  await page.getByText("does not take the key").waitFor();
  await dialog.getByLabel("Key").fill(mine);
  await dialog.getByRole("button", { name: "Open" }).click();
  await page.waitForSelector(".connection.live"); // the socket has the key too
  await page.getByRole("treeitem").filter({ hasText: "of mine" }).click();
  await page.getByRole("region", { name: "Text of the session" }).getByText("func").first().waitFor();
  expect(await page.getByText("of theirs").count()).toBe(0);
  await page.reload();
  await page.waitForSelector(".connection.live");
  await page.getByRole("button", { name: "Log out" }).click();
  await dialog.waitFor();
  expect(faults).toEqual([]);
  for (const key of [mine, theirs]) expect(server.log).not.toContain(key);
});
