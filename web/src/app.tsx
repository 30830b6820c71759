import { useState } from "preact/hooks";
import { TreeCanvas } from "./canvas";
import { KeyDialog, NewSessionDialog } from "./dialogs";
import { apiKey, declineKey, keepKey, keyDeclined, keyWanted } from "./key";
import { grouped } from "./painter";
import { Pane } from "./pane";
import { connection, dismiss, forest, loaded, notices, serverVersion, treeVersion } from "./store";
import { nextTheme, themeChoice } from "./theme";
import { TreeList } from "./treelist";

export function App() {
  const [creating, setCreating] = useState(false);
  return (
    <>
      <header class="top">
        <h1>
          <img src="/favicon.svg" alt="" width={20} height={20} /> Rocket
        </h1>
        <Counts />
        <div class="spacer" />
        <Connection />
        <a href="/docs">API</a>
        <button type="button" class="quiet" onClick={nextTheme} title="Colours: system, light, dark">
          Theme: {themeChoice.value}
        </button>
        {keyDeclined.value && (
          <button type="button" class="quiet" onClick={askAgain}>
            Log in
          </button>
        )}
        {apiKey.value && !keyWanted.value && !keyDeclined.value && (
          <button type="button" class="quiet" onClick={forgetKey} title="Forget the API key of this tab">
            Log out
          </button>
        )}
        <button type="button" class="primary" onClick={() => setCreating(true)}>
          New session
        </button>
      </header>
      <main>
        <TreeList />
        <TreeCanvas />
        <Pane />
      </main>
      <Notices />
      {keyWanted.value && <KeyDialog onClose={declineKey} />}
      {creating && <NewSessionDialog onClose={() => setCreating(false)} />}
    </>
  );
}

function askAgain(): void {
  keyDeclined.value = false;
  keyWanted.value = true;
}

function forgetKey(): void {
  keepKey("");
  location.reload();
}

function Counts() {
  treeVersion.value;
  if (!loaded.value) return <span class="counts">Loading…</span>;
  const by: Record<string, number> = {};
  for (const node of forest.nodes.values()) {
    if (node.session) by[node.session.state] = (by[node.session.state] ?? 0) + 1;
  }
  const parts = ["running", "detached", "closed"].filter((s) => by[s]).map((s) => `${grouped(by[s]!)} ${s}`);
  const total = forest.size === 1 ? "1 session" : `${grouped(forest.size)} sessions`;
  return <span class="counts">{[total, ...parts].join(" · ")}</span>;
}

function Connection() {
  const state = connection.value;
  const text = { connecting: "connecting", live: "live", lost: "reconnecting" }[state];
  return (
    <span class={`connection ${state}`} role="status" title={serverVersion.value ? `rocket ${serverVersion.value}` : undefined}>
      <i class="dot" aria-hidden="true" />
      {text}
    </span>
  );
}

function Notices() {
  return (
    <div class="notices">
      {notices.value.map((n) => (
        <div key={n.id} class={`notice ${n.kind}`} role={n.kind === "error" ? "alert" : "status"}>
          <div>
            {n.text}
            {n.details.length > 0 && (
              <ul>
                {n.details.map((d) => (
                  <li key={d}>{d}</li>
                ))}
              </ul>
            )}
          </div>
          <button type="button" class="icon" aria-label="Dismiss" onClick={() => dismiss(n.id)}>
            ×
          </button>
        </div>
      ))}
    </div>
  );
}
