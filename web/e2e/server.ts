// Starts the real server on a free port and a data directory of its own, and ends both.

import { execFileSync, spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { chmodSync, mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

const binary = join(import.meta.dirname, "../../bin/rocket");
const startMillis = 90_000; // initdb, migrations and loading on a busy machine
const stopMillis = 45_000;

/**
 * A port that this server can have again after a crash: below those that systems hand out to connections, and to
 * listeners that name none, which begin at 32768 on Linux.
 */
async function freePort(): Promise<number> {
  for (;;) {
    const port = 20_000 + Math.floor(Math.random() * 12_000);
    const server = createServer().listen(port, "127.0.0.1");
    const free = await once(server, "listening").then(
      () => true,
      () => false,
    );
    if (!free) continue;
    server.close();
    await once(server, "close");
    return port;
  }
}

export class Server {
  private child: ChildProcess | null = null;
  private output = "";

  private constructor(
    readonly port: number,
    private readonly dir: string,
    private readonly flags: string[],
  ) {}

  static async start(...flags: string[]): Promise<Server> {
    const dir = mkdtempSync(join(tmpdir(), "rocket-e2e-"));
    chmodSync(dir, 0o755); // as root, Postgres runs as another user and must get through
    const server = new Server(await freePort(), dir, flags);
    await server.up();
    return server;
  }

  get url(): string {
    return `http://127.0.0.1:${this.port}`;
  }

  /** What the server said so far. */
  get log(): string {
    return this.output;
  }

  /** Starts the process, on the same data each time. */
  async up(): Promise<void> {
    const child = spawn(binary, ["serve", "--listen", `127.0.0.1:${this.port}`, "--data-dir", join(this.dir, "data"), ...this.flags], {
      stdio: ["ignore", "pipe", "pipe"],
    });
    this.child = child;
    for (const stream of [child.stdout, child.stderr]) stream!.on("data", (data: Buffer) => (this.output += data));
    const deadline = Date.now() + startMillis;
    while (Date.now() < deadline) {
      if (child.exitCode !== null) throw new Error(`the server ended with ${child.exitCode}:\n${this.output}`);
      const ready = await fetch(`${this.url}/readyz`).then(
        (r) => r.ok,
        () => false,
      );
      if (ready) return;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    throw new Error(`the server was not ready in time:\n${this.output}`);
  }

  /** A new API key of the running server. */
  key(tenant: string): string {
    return execFileSync(binary, ["key", "create", "--tenant", tenant, "--data-dir", join(this.dir, "data")], {
      encoding: "utf8",
      stdio: ["ignore", "pipe", "ignore"],
    }).trim();
  }

  /** kill -9, as a crash does. */
  async crash(): Promise<void> {
    await this.end("SIGKILL");
  }

  async stop(): Promise<void> {
    await this.end("SIGTERM");
    rmSync(this.dir, { recursive: true, force: true });
  }

  private async end(signal: NodeJS.Signals): Promise<void> {
    const child = this.child;
    this.child = null;
    if (!child || child.exitCode !== null) return;
    const exit = once(child, "exit");
    child.kill(signal);
    const timer = setTimeout(() => child.kill("SIGKILL"), stopMillis);
    await exit;
    clearTimeout(timer);
  }

  /** A call of the API, for what a test needs beside the page. */
  async call<T>(method: string, path: string, body?: unknown): Promise<T> {
    const response = await fetch(this.url + path, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await response.text();
    if (!response.ok) throw new Error(`${method} ${path}: ${response.status} ${text}`);
    return (text ? JSON.parse(text) : undefined) as T;
  }
}
