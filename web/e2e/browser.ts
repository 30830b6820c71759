// A page in Debian's Chromium that records what should never happen.

import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium, type BrowserContext, type Page } from "playwright-core";

const flags = [
  "--no-sandbox", // tests run as root in containers
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

export async function openBrowser(options: { colorScheme?: "light" | "dark"; width?: number } = {}): Promise<BrowserContext> {
  return chromium.launchPersistentContext(mkdtempSync(join(tmpdir(), "rocket-browser-")), {
    executablePath: process.env["CHROMIUM"] ?? "/usr/bin/chromium",
    args: flags,
    headless: true,
    viewport: { width: options.width ?? 1360, height: 820 },
    colorScheme: options.colorScheme ?? "light",
    reducedMotion: "reduce",
  });
}

export interface Watched {
  page: Page;
  /** Errors of scripts and refusals by the content policy. */
  faults: string[];
  /** Requests that left the server's own origin. */
  foreign: string[];
}

export async function openPage(context: BrowserContext, url: string, ready = ".connection.live"): Promise<Watched> {
  const page = await context.newPage();
  const watched: Watched = { page, faults: [], foreign: [] };
  page.on("pageerror", (err) => watched.faults.push(err.message));
  page.on("console", (m) => {
    if (m.type() === "error" && !m.text().startsWith("Failed to load resource") && !m.text().includes("WebSocket")) {
      watched.faults.push(m.text());
    }
  });
  const origin = new URL(url).host;
  page.on("request", (r) => {
    const host = new URL(r.url()).host;
    if (host !== origin && host !== "") watched.foreign.push(r.url());
  });
  await page.goto(url);
  await page.waitForSelector(ready);
  return watched;
}
