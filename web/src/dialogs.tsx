// Dialogs on the browser's own <dialog>: it keeps the focus inside and gives it back.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { createSession } from "./actions";
import { inWords, type CreateBody } from "./api";
import { ModeChoice, savedMode } from "./composer";
import { apiKey, keepKey } from "./key";
import type { Mode } from "./turn";

function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ComponentChildren }) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    ref.current?.showModal();
    ref.current?.querySelector<HTMLElement>("input, textarea")?.focus();
  }, []);
  return (
    <dialog ref={ref} aria-label={title} onClose={onClose} onClick={(e) => e.target === ref.current && ref.current?.close()}>
      <div class="dialog-body">
        <h2>{title}</h2>
        {children}
      </div>
    </dialog>
  );
}

const close = (e: Event) => (e.currentTarget as HTMLElement).closest("dialog")?.close();

interface ConfirmProps {
  title: string;
  text: string;
  confirm: string;
  onClose: () => void;
  onConfirm: () => void;
}

export function ConfirmDialog({ title, text, confirm, onClose, onConfirm }: ConfirmProps) {
  return (
    <Dialog title={title} onClose={onClose}>
      <p>{text}</p>
      <div class="dialog-actions">
        <button type="button" onClick={close}>
          Keep it
        </button>
        <button
          type="button"
          class="danger solid"
          onClick={(e) => {
            close(e);
            onConfirm();
          }}
        >
          {confirm}
        </button>
      </div>
    </Dialog>
  );
}

interface PromptProps {
  title: string;
  label: string;
  value: string;
  confirm: string;
  onClose: () => void;
  onConfirm: (value: string) => void;
}

export function PromptDialog({ title, label, value, confirm, onClose, onConfirm }: PromptProps) {
  const [text, setText] = useState(value);
  return (
    <Dialog title={title} onClose={onClose}>
      <form
        onSubmit={(e) => {
          e.preventDefault();
          close(e);
          onConfirm(text);
        }}
      >
        <label class="field">
          {label}
          <input value={text} onInput={(e) => setText(e.currentTarget.value)} />
        </label>
        <div class="dialog-actions">
          <button type="button" onClick={close}>
            Leave it
          </button>
          <button type="submit" class="primary">
            {confirm}
          </button>
        </div>
      </form>
    </Dialog>
  );
}

/** Asks for the API key, or for another one than the server refused. */
export function KeyDialog({ onClose }: { onClose: () => void }) {
  const [key, setKey] = useState("");
  return (
    <Dialog title="API key" onClose={onClose}>
      <form
        onSubmit={(e) => {
          e.preventDefault();
          keepKey(key.trim());
          location.reload();
        }}
      >
        <p>{apiKey.value ? "The server does not take the key of this tab." : "This server wants an API key."} It is kept until the tab is closed.</p>
        <label class="field">
          Key
          <input type="password" autocomplete="off" value={key} onInput={(e) => setKey(e.currentTarget.value)} />
        </label>
        <div class="dialog-actions">
          <button type="button" onClick={close}>
            Not now
          </button>
          <button type="submit" class="primary" disabled={!key.trim()}>
            Open
          </button>
        </div>
      </form>
    </Dialog>
  );
}

export function NewSessionDialog({ onClose }: { onClose: () => void }) {
  const [title, setTitle] = useState("");
  const [text, setText] = useState("");
  const [mode, setMode] = useState<Mode>(savedMode);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const submit = async (e: SubmitEvent) => {
    e.preventDefault();
    const dialog = (e.currentTarget as HTMLElement).closest("dialog");
    const body: CreateBody = {};
    if (title) body.title = title;
    if (text && mode === "raw") body.input = text;
    if (text && mode === "chat") body.messages = [{ role: "user", content: text }];
    setBusy(true);
    setError("");
    try {
      await createSession(body);
      dialog?.close();
    } catch (err) {
      const { text, details } = inWords(err);
      setError([text, ...details].join("; "));
    }
    setBusy(false);
  };
  return (
    <Dialog title="New session" onClose={onClose}>
      <form onSubmit={(e) => void submit(e)}>
        <label class="field">
          Title
          <input value={title} placeholder="optional" onInput={(e) => setTitle(e.currentTarget.value)} />
        </label>
        <label class="field">
          First text
          <textarea
            rows={6}
            value={text}
            placeholder="Optional. It is read in now and shared by every fork; nothing is generated yet."
            onInput={(e) => setText(e.currentTarget.value)}
          />
        </label>
        <ModeChoice mode={mode} onMode={setMode} name="new-mode" />
        {error && (
          <p class="form-error" role="alert">
            {error}
          </p>
        )}
        <div class="dialog-actions">
          <button type="button" onClick={close}>
            Cancel
          </button>
          <button type="submit" class="primary" disabled={busy}>
            Create
          </button>
        </div>
      </form>
    </Dialog>
  );
}
