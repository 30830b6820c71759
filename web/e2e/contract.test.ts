// The dashboard's hand-written types against the schema that the server makes from its own.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import ts from "typescript";
import { afterAll, beforeAll, expect, test } from "vitest";
import { Server } from "./server";

interface Schema {
  properties?: Record<string, unknown>;
}

let server: Server;
beforeAll(async () => {
  server = await Server.start();
});
afterAll(async () => server?.stop());

/** The fields of each interface in types.ts, by the interface's name. */
function fieldsOfTypes(): Map<string, string[]> {
  const path = join(import.meta.dirname, "../src/types.ts");
  const source = ts.createSourceFile(path, readFileSync(path, "utf8"), ts.ScriptTarget.Latest);
  const fields = new Map<string, string[]>();
  source.forEachChild((node) => {
    if (!ts.isInterfaceDeclaration(node)) return;
    const names = node.members.flatMap((m) => (m.name && ts.isIdentifier(m.name) ? [m.name.text] : []));
    fields.set(node.name.text, names);
  });
  return fields;
}

/** Our name for a shape, and the server's where it differs. */
const schemas: Record<string, string> = {
  Session: "Session",
  Residency: "Residency",
  Restored: "Restored",
  Usage: "Usage",
  Turn: "Turn",
  RocketEvent: "Event",
  TokenRange: "TokenRange",
  ForkResult: "ForkResult",
};

test("every field that the dashboard reads is one that the server sends", async () => {
  const doc = await server.call<{ components: { schemas: Record<string, Schema> } }>("GET", "/openapi.json");
  const ours = fieldsOfTypes();
  for (const [type, schema] of Object.entries(schemas)) {
    const sent = Object.keys(doc.components.schemas[schema]?.properties ?? {});
    expect(sent.length, `${schema} in /openapi.json`).toBeGreaterThan(0);
    const missing = (ours.get(type) ?? ["no such type"]).filter((f) => !sent.includes(f));
    expect(missing, `fields of ${type}`).toEqual([]);
  }
});
