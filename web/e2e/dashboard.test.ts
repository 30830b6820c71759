// The dashboard in Chromium against the real server, engine and ledger.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import type { BrowserContext, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from "vitest";
import { openBrowser, openPage, type Watched } from "./browser";
import { Server } from "./server";

interface Session {
  id: string;
  state: string;
  length: number;
  parent_id: string | null;
}

const axeSource = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

let server: Server;
let context: BrowserContext;
let watched: Watched;
let page: Page;

beforeAll(async () => {
  server = await Server.start();
  context = await openBrowser();
});
afterAll(async () => {
  await context?.close();
  await server?.stop();
});
beforeEach(async ({ onTestFailed, task }) => {
  onTestFailed(async () => {
    const name = task.name.replace(/\W+/g, "-").slice(0, 40);
    await page.screenshot({ path: join(import.meta.dirname, "shots", `${name}.png`) });
    console.error(`${server.log.slice(-2000)}\na picture of the page is in e2e/shots/${name}.png`);
  });
  for (const old of context.pages().slice(1)) await old.close();
  watched = await openPage(context, server.url + "/");
  page = watched.page;
});
afterEach(async () => {
  expect(watched.faults).toEqual([]);
  expect(watched.foreign).toEqual([]);
});

const button = (name: string) => page.getByRole("button", { name, exact: true });
const row = (title: string) => page.getByRole("treeitem").filter({ hasText: title });
const pane = () => page.getByRole("region", { name: "Session", exact: true });
const text = () => page.getByRole("region", { name: "Text of the session" });
const progress = () => page.locator(".progress [role=status]");

async function newSession(title: string, input: string): Promise<void> {
  await button("New session").click();
  const dialog = page.getByRole("dialog", { name: "New session" });
  await dialog.getByLabel("Title").fill(title);
  await dialog.getByLabel("First text").fill(input);
  await dialog.getByRole("button", { name: "Create" }).click();
  await dialog.waitFor({ state: "hidden" });
  await pane().getByRole("heading", { name: title }).waitFor();
}

async function send(prompt: string, maxTokens: number, more: { ignoreEos?: boolean } = {}): Promise<void> {
  const options = page.locator("details.options");
  if ((await options.getAttribute("open")) === null) await options.locator("summary").click();
  await page.getByLabel("Max tokens").fill(String(maxTokens));
  await page.getByLabel("Temperature").fill("0");
  if (more.ignoreEos) await page.getByLabel("Go past end tokens").check();
  await page.getByLabel("Prompt").fill(prompt);
  await button("Send").click();
}

const selectedId = () => page.evaluate(() => decodeURIComponent(location.hash.slice(1)));
const tokensOnPage = () => page.locator(".transcript .t").count();

async function accessible(): Promise<void> {
  await page.evaluate(axeSource);
  const violations = await page.evaluate(async () => {
    const axe = (globalThis as unknown as { axe: { run(): Promise<{ violations: { id: string; nodes: { html: string }[] }[] }> } }).axe;
    const result = await axe.run();
    return result.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(" | ")}`);
  });
  expect(violations).toEqual([]);
}

test("a session is made, talked to and read back token by token", async () => {
  await newSession("first words", "package main\n\nfunc main() {");
  await row("first words").waitFor();
  await expect.poll(() => text().innerText()).toContain("func main() {");
  await send("\n\tfmt", 24, { ignoreEos: true });
  await expect.poll(() => progress().innerText()).toContain("ended: length");
  const id = await selectedId();
  const session = await server.call<Session>("GET", `/v1/sessions/${id}`);
  // One element a token, and the same text as the ledger's.
  await expect.poll(tokensOnPage).toBe(session.length);
  const line = await server.call<{ text: string; tokens: number[] }>("GET", `/v1/sessions/${id}/tokens`);
  expect(line.tokens.length).toBe(session.length);
  expect(await page.locator(".transcript .t").allTextContents().then((all) => all.join(""))).toBe(line.text);
  await expect.poll(() => page.locator(".transcript .t.g").count()).toBe(24);
  await expect.poll(() => page.locator(".progress").innerText()).toContain("24 tokens");
});

test("text appears while it is generated, and a turn can be cancelled", async () => {
  await newSession("long turn", "func");
  await send(" x() {", 20_000, { ignoreEos: true }); // longer than the test needs
  await expect.poll(() => page.locator(".t.g").count()).toBeGreaterThan(5);
  expect(await progress().innerText()).toContain("generating");
  await row("long turn").locator(".dot.running").waitFor();
  await button("Cancel").click();
  await expect.poll(() => progress().innerText()).toContain("ended: cancelled");
  const session = await server.call<Session>("GET", `/v1/sessions/${await selectedId()}`);
  expect(session.state).toBe("idle");
  await expect.poll(tokensOnPage).toBe(session.length);
});

test("a click on a token forks there, and the tree shows it", async () => {
  await newSession("parent", "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(1)\n}\n");
  await expect.poll(tokensOnPage).toBeGreaterThan(8);
  const parent = await selectedId();
  await page.locator(".transcript .t").nth(6).click();
  await expect.poll(() => page.getByLabel("Fork at").inputValue()).toBe("7");
  await button("Fork").click();
  await expect.poll(selectedId).not.toBe(parent);
  const child = await server.call<Session & { forked_at: number }>("GET", `/v1/sessions/${await selectedId()}`);
  expect([child.parent_id, child.forked_at, child.length]).toEqual([parent, 7, 7]);
  await expect.poll(tokensOnPage).toBe(7);
  await pane().getByText("from parent").waitFor();
  const childRow = page.locator(`[id="row-${child.id}"]`);
  await expect.poll(() => childRow.getAttribute("aria-level")).toBe("2");
  // Back at the parent, the text says where the fork leaves it.
  await pane().getByRole("button", { name: "from parent" }).click();
  await expect.poll(selectedId).toBe(parent);
  await page.locator(".branch").waitFor();
});

test("a fork inside generated text shows what was given and what was generated", async () => {
  await newSession("cut", "package main\n");
  const given = (await server.call<Session>("GET", `/v1/sessions/${await selectedId()}`)).length;
  const parent = await selectedId();
  await server.call("POST", `/v1/sessions/${parent}/turns?wait=true`, { max_tokens: 12, temperature: 0, ignore_eos: true });
  await page.getByLabel("Fork at").fill(String(given + 5));
  await button("Fork").click();
  await expect.poll(selectedId).not.toBe(parent);
  await expect.poll(tokensOnPage).toBe(given + 5);
  await expect.poll(() => page.locator(".t.g").count()).toBe(5);
});

test("one call makes many children, and the picture draws them", async () => {
  await newSession("fan out", "package main\n");
  await page.getByLabel("children").fill("24");
  await button("Fork").click();
  await page.getByText("24 children at token").waitFor();
  const parent = await selectedId();
  await expect.poll(async () => (await server.call<{ nodes: unknown[] }>("GET", `/v1/sessions/${parent}/tree`)).nodes.length).toBe(25);
  await button("Fit").click();
  await expect.poll(async () => Number(await page.locator("canvas").getAttribute("data-drawn"))).toBeGreaterThanOrEqual(25);
});

test("a click in the picture selects a session", async () => {
  await newSession("picture", "x");
  const id = await selectedId();
  await page.goto(server.url + "/");
  await row("picture").waitFor();
  await expect.poll(async () => Number(await page.locator("canvas").getAttribute("data-drawn"))).toBeGreaterThan(0);
  // The newest root is the first in the top left corner, once it is drawn and all is in its place.
  await expect
    .poll(async () => {
      const box = (await page.locator("canvas").boundingBox())!;
      await page.mouse.click(box.x + 60, box.y + 40);
      return selectedId();
    })
    .toBe(id);
});

test("detach and resume, and where the bytes are", async () => {
  await newSession("moves", "package main\n\nfunc main() {}\n".repeat(20));
  await send("\nfunc", 8, { ignoreEos: true });
  await expect.poll(() => progress().innerText()).toContain("ended");
  await button("Detach").click();
  await pane().locator(".badge.detached").waitFor();
  const session = await server.call<Session>("GET", `/v1/sessions/${await selectedId()}`);
  expect(session.state).toBe("detached");
  // The last token is pending: nothing is kept for it.
  await pane().getByText(`host ${session.length - 1}`).waitFor();
  await button("Resume").click();
  await page.getByText(/moves is back: .* 0 recomputed/).waitFor(); // does not stay
  await pane().locator(".badge.idle").waitFor();
});

test("a turn shorter than a frame is told too", async () => {
  await page.addInitScript(() => {
    window.requestAnimationFrame = (draw) => window.setTimeout(() => draw(performance.now()), 1500);
  });
  await page.reload();
  await newSession("short", "package main\n");
  await send("\nfunc", 1, { ignoreEos: true });
  await expect.poll(() => progress().innerText()).toBe("ended: length");
});

test("a closed session takes no turns and no forks; a deleted one is gone", async () => {
  await newSession("ends", "package main\n");
  await button("Close").click();
  await page.getByRole("button", { name: "Close session" }).click();
  await pane().locator(".badge.closed").waitFor();
  await expect.poll(() => page.getByLabel("Prompt").isDisabled()).toBe(true);
  await expect.poll(() => button("Fork").isDisabled()).toBe(true);
  const id = await selectedId();
  await button("Delete").click();
  await page.getByRole("button", { name: "Delete session" }).click();
  await row("ends").waitFor({ state: "detached" });
  expect((await fetch(`${server.url}/v1/sessions/${id}`)).status).toBe(404);
});

test("what others do appears by itself", async () => {
  const made = await server.call<Session>("POST", "/v1/sessions", { title: "from elsewhere", input: "package main" });
  await row("from elsewhere").waitFor();
  await row("from elsewhere").click();
  await expect.poll(tokensOnPage).toBe(made.length);
  await server.call("POST", `/v1/sessions/${made.id}/turns?wait=true`, { max_tokens: 8, temperature: 0, ignore_eos: true });
  await expect.poll(tokensOnPage).toBe(made.length + 8);
  await server.call("PATCH", `/v1/sessions/${made.id}`, { title: "renamed" });
  await server.call("DELETE", `/v1/sessions/${made.id}`);
  await page.locator(`[id="row-${made.id}"]`).waitFor({ state: "detached" });
});

test("a page that opens in mid-turn joins without a gap", async () => {
  const made = await server.call<Session>("POST", "/v1/sessions", { title: "under way", input: "package main\n\nfunc" });
  await server.call("POST", `/v1/sessions/${made.id}/turns`, { max_tokens: 20_000, temperature: 0, ignore_eos: true });
  await expect.poll(async () => (await server.call<Session>("GET", `/v1/sessions/${made.id}`)).length).toBeGreaterThan(made.length + 5);
  await page.goto(`${server.url}/#${made.id}`);
  await page.reload();
  await expect.poll(() => progress().innerText()).toContain("generating");
  const joined = await tokensOnPage();
  await expect.poll(tokensOnPage).toBeGreaterThan(joined + 20);
  const live = await page.locator(".transcript .t").allTextContents();
  await button("Cancel").click();
  await expect.poll(() => progress().innerText()).toContain("ended: cancelled");
  const line = await server.call<{ text: string; tokens: number[] }>("GET", `/v1/sessions/${made.id}/tokens`);
  // From where the page begins, which is not the start if it took long to open, up to the end.
  const shown = () => page.locator(".transcript .t").allTextContents().then((all) => all.join(""));
  await expect.poll(async () => line.text.endsWith(await shown())).toBe(true);
  expect((await shown()).startsWith(live.join(""))).toBe(true);
  expect(await tokensOnPage()).toBeGreaterThan(joined + 20);
});

test("an error of the server is told in its own words", async () => {
  await newSession("errors", "x");
  await server.call("POST", `/v1/sessions/${await selectedId()}/close`, undefined);
  const id = await selectedId();
  const response = await page.evaluate(
    (path) => fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }).then((r) => r.json()),
    `/v1/sessions/${id}/turns`,
  );
  expect(response.code).toBe("session_closed");
  // The same by hand: text longer than the model's context.
  await button("New session").click();
  const dialog = page.getByRole("dialog", { name: "New session" });
  await dialog.getByLabel("First text").fill("word ".repeat(200_000));
  await dialog.getByRole("button", { name: "Create" }).click();
  await dialog.getByRole("alert").waitFor();
  expect(await dialog.getByRole("alert").innerText()).toMatch(/context|tokens/);
  await page.keyboard.press("Escape");
});

test("the keyboard alone walks the tree and selects", async () => {
  await newSession("keys", "package main\n");
  const parent = await selectedId();
  await page.getByLabel("children").fill("2");
  await button("Fork").click();
  await page.locator(`[id="row-${parent}"][aria-expanded=true]`).waitFor();
  await page.getByRole("searchbox").focus();
  await page.keyboard.press("Tab");
  await page.keyboard.press("Home");
  await page.keyboard.press("ArrowLeft");
  await page.locator(`[id="row-${parent}"][aria-expanded=false]`).waitFor();
  await page.keyboard.press("ArrowRight");
  await page.locator(`[id="row-${parent}"][aria-expanded=true]`).waitFor();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await expect.poll(selectedId).not.toBe(parent);
  const child = await server.call<Session>("GET", `/v1/sessions/${await selectedId()}`);
  expect(child.parent_id).toBe(parent);
});

test("a filter narrows the list", async () => {
  await newSession("needle-1", "x");
  await newSession("hay-1", "x");
  await page.getByRole("searchbox").fill("needle-1");
  await row("hay-1").waitFor({ state: "detached" });
  await expect.poll(() => page.getByRole("treeitem").count()).toBe(1);
});

for (const colorScheme of ["light", "dark"] as const) {
  test(`nothing that axe finds fault with, ${colorScheme}`, async () => {
    await page.emulateMedia({ colorScheme });
    await newSession(`axe ${colorScheme}`, "package main\n");
    await send("\nfunc", 8, { ignoreEos: true });
    await expect.poll(() => progress().innerText()).toContain("ended");
    await page.getByLabel("children").fill("2");
    await button("Fork").click();
    await page.getByText("2 children at token").waitFor();
    await page.getByLabel("Token boundaries").check();
    await accessible();
    await button("New session").click();
    await accessible();
    await page.keyboard.press("Escape");
  });
}

test("after a crash in mid-turn the page comes back by itself and shows what was committed", async () => {
  await newSession("survivor", "package main\n\nfunc main() {");
  const id = await selectedId();
  await send("\n", 20_000, { ignoreEos: true });
  await expect.poll(() => page.locator(".t.g").count()).toBeGreaterThan(20);
  await server.crash();
  await page.locator(".connection.lost").waitFor();
  await server.up();
  await page.locator(".connection.live").waitFor({ timeout: 30_000 });
  await expect.poll(() => progress().innerText()).toContain("interrupted");
  const session = await server.call<Session>("GET", `/v1/sessions/${id}`);
  expect(session.state).toBe("idle");
  await expect.poll(tokensOnPage).toBe(Math.min(session.length, 4096));
  const before = await tokensOnPage();
  await button("Continue").click();
  await expect.poll(tokensOnPage).toBeGreaterThan(before);
  await server.call("POST", `/v1/sessions/${id}/cancel`);
});
