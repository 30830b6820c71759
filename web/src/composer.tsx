// Sends a turn: a chat message, raw text, or nothing (decoding just goes on).

import { useState } from "preact/hooks";
import { sendTurn } from "./actions";
import { turnBody, type Mode } from "./turn";
import type { Session } from "./types";

const modeKey = "rocket.mode";
const maxTokensDefault = 128;

export function savedMode(): Mode {
  return localStorage.getItem(modeKey) === "chat" ? "chat" : "raw";
}

export function ModeChoice({ mode, onMode, name }: { mode: Mode; onMode: (mode: Mode) => void; name: string }) {
  const choice = (value: Mode, text: string) => (
    <label class="check">
      <input
        type="radio"
        name={name}
        checked={mode === value}
        onChange={() => {
          localStorage.setItem(modeKey, value);
          onMode(value);
        }}
      />
      {text}
    </label>
  );
  return (
    <div class="modes" role="radiogroup" aria-label="Kind of text">
      {choice("raw", "Raw text")}
      {choice("chat", "Chat message")}
    </div>
  );
}

export function Composer({ session, running }: { session: Session; running: boolean }) {
  const [mode, setMode] = useState<Mode>(savedMode);
  const [text, setText] = useState("");
  const [maxTokens, setMaxTokens] = useState(String(maxTokensDefault));
  const [temperature, setTemperature] = useState("");
  const [seed, setSeed] = useState("");
  const [ignoreEos, setIgnoreEos] = useState(false);
  const [busy, setBusy] = useState(false);
  const closed = session.state === "closed";
  const disabled = busy || running || closed;

  const send = async (withText: boolean) => {
    if (disabled || (withText && text === "")) return;
    setBusy(true);
    const ok = await sendTurn(
      session.id,
      turnBody({ mode, text: withText ? text : "", maxTokens, temperature, seed, ignoreEos }),
    );
    setBusy(false);
    if (ok && withText) setText("");
  };

  return (
    <form
      class="composer"
      aria-label="Send a turn"
      onSubmit={(e) => {
        e.preventDefault();
        void send(true);
      }}
    >
      <textarea
        rows={3}
        aria-label="Prompt"
        placeholder={closed ? "This session is closed" : mode === "chat" ? "Message" : "Text to go on from, e.g. func main() {"}
        disabled={closed}
        value={text}
        onInput={(e) => setText(e.currentTarget.value)}
        onKeyDown={(e) => {
          if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
            e.preventDefault();
            void send(true);
          }
        }}
      />
      <div class="composer-row">
        <ModeChoice mode={mode} onMode={setMode} name="turn-mode" />
        <div class="spacer" />
        <button type="button" disabled={disabled || session.length === 0} onClick={() => void send(false)} title="Go on without new text">
          Continue
        </button>
        <button type="submit" class="primary" disabled={disabled || text === ""} title="Ctrl + Enter">
          Send
        </button>
      </div>
      <details class="options">
        <summary>Sampling</summary>
        <div class="option-grid">
          <label>
            Max tokens
            <input type="number" min={1} step={1} value={maxTokens} onInput={(e) => setMaxTokens(e.currentTarget.value)} />
          </label>
          <label>
            Temperature
            <input type="number" min={0} max={10} step="any" placeholder="default" value={temperature} onInput={(e) => setTemperature(e.currentTarget.value)} />
          </label>
          <label>
            Seed
            <input type="number" min={0} step={1} placeholder="drawn" value={seed} onInput={(e) => setSeed(e.currentTarget.value)} />
          </label>
          <label class="check">
            <input type="checkbox" checked={ignoreEos} onChange={(e) => setIgnoreEos(e.currentTarget.checked)} />
            Go past end tokens
          </label>
        </div>
      </details>
    </form>
  );
}
