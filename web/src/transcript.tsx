// The line of the selected session as text, one element a token (or a delta, until its tokens are known).

import { Fragment } from "preact";
import { memo } from "./memo";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Follower } from "./follower";
import { label, type Node } from "./forest";
import type { Span } from "./line";
import { grouped } from "./painter";
import { forest, select, treeVersion } from "./store";

const blockTokens = 48; // spans of a block, at least
const stickPixels = 60; // so near the end, the view follows new text

interface Props {
  follower: Follower;
  picked: number | null; // the offset that a fork would start at
  onPick: (at: number | null) => void;
}

/**
 * Blocks that end with a line, so that new text redraws and lays out the last block and not the whole line.
 * Text without line breaks is one long block: correct, only slower.
 */
export function blocksOf(spans: Span[]): Span[][] {
  const blocks: Span[][] = [];
  let block: Span[] = [];
  for (const span of spans) {
    block.push(span);
    if (block.length >= blockTokens && span.text.endsWith("\n")) {
      blocks.push(block);
      block = [];
    }
  }
  if (block.length > 0) blocks.push(block);
  return blocks;
}

/** Where children leave this line, by token offset. */
function childrenAt(id: string): Map<number, Node[]> {
  const at = new Map<number, Node[]>();
  for (const childId of forest.nodes.get(id)?.children ?? []) {
    const child = forest.nodes.get(childId)!;
    const offset = child.session?.forked_at;
    if (offset === null || offset === undefined) continue;
    at.set(offset, [...(at.get(offset) ?? []), child]);
  }
  return at;
}

export function Transcript({ follower, picked, onPick }: Props) {
  const version = follower.version.value;
  const tree = treeVersion.value;
  const [boundaries, setBoundaries] = useState(false); // draw the boundaries of tokens
  const [hovered, setHovered] = useState<Span | null>(null);
  const [busy, setBusy] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const sticks = useRef(true);
  const session = forest.get(follower.id);
  const forkedAt = session?.forked_at ?? null;

  const children = useMemo(() => childrenAt(follower.id), [follower, tree]);
  const blocks = useMemo(() => blocksOf(follower.line.spans), [version, follower]);
  const marksAt = (at: number): Marks | null => {
    const marks: Marks = {
      parent: at === forkedAt ? (session?.parent_id ?? "") : null,
      children: children.get(at)?.map((n) => n.id) ?? [],
      picked: at === picked,
    };
    return marks.parent !== null || marks.children.length > 0 || marks.picked ? marks : null;
  };
  const marksIn = (block: Span[]) => {
    const found = new Map<number, Marks>();
    for (const s of block) {
      const m = marksAt(s.from);
      if (m) found.set(s.from, m);
    }
    return found;
  };

  useEffect(() => {
    const el = box.current;
    if (el && sticks.current) el.scrollTop = el.scrollHeight;
  }, [version]);

  const spanAt = (target: EventTarget | null): Span | null => {
    const from = target instanceof HTMLElement ? target.dataset["from"] : undefined;
    return from === undefined ? null : (follower.line.spans.find((s) => s.from === Number(from)) ?? null);
  };

  const earlier = async () => {
    const el = box.current!;
    const below = el.scrollHeight - el.scrollTop;
    sticks.current = false;
    setBusy(true);
    await follower.earlier().finally(() => setBusy(false));
    requestAnimationFrame(() => requestAnimationFrame(() => (el.scrollTop = el.scrollHeight - below)));
  };

  const end = follower.line.end;
  return (
    <div class="transcript-wrap">
      <div
        class={`transcript${boundaries ? " marks" : ""}`}
        ref={box}
        role="region"
        aria-label="Text of the session"
        tabIndex={0}
        onScroll={(e) => {
          const el = e.currentTarget;
          sticks.current = el.scrollHeight - el.scrollTop - el.clientHeight < stickPixels;
        }}
        onMouseOver={(e) => setHovered(spanAt(e.target))}
        onMouseLeave={() => setHovered(null)}
        onClick={(e) => {
          if (getSelection()?.toString()) return; // a person is copying text
          const span = spanAt(e.target);
          if (span) onPick(span.to === picked ? null : span.to);
        }}
      >
        {follower.shownFrom > 0 && (
          <button type="button" class="earlier" disabled={busy} onClick={() => void earlier()}>
            {grouped(follower.shownFrom)} earlier tokens
          </button>
        )}
        {!follower.ready.value && <p class="hint">Reading the line…</p>}
        {follower.ready.value && end === 0 && <p class="hint">Nothing on this line yet. Send a prompt below.</p>}
        {blocks.map((block) => (
          <Block key={block[0]!.from} spans={block} marks={marksIn(block)} version={tree} />
        ))}
        {end > 0 && <MarksHere marks={marksAt(end)} at={end} />}
        {follower.line.phase === "running" && <span class="cursor" aria-hidden="true" />}
      </div>
      <div class="token-line">
        <span class="token-facts" aria-hidden="true">
        {hovered ? (
          <>
            {hovered.to - hovered.from === 1 ? `token ${grouped(hovered.from)}` : `tokens ${grouped(hovered.from)}–${grouped(hovered.to - 1)}`}
            {" · "}
            <code>{JSON.stringify(hovered.text.length > 40 ? hovered.text.slice(0, 40) + "…" : hovered.text)}</code>
            {" · "}
            {hovered.kind} · click to fork after it
          </>
        ) : (
          `${grouped(follower.line.cursor ?? end)} tokens`
        )}
        </span>
        <label class="check">
          <input type="checkbox" checked={boundaries} onChange={(e) => setBoundaries(e.currentTarget.checked)} />
          Token boundaries
        </label>
      </div>
    </div>
  );
}

/** What is drawn between two tokens. */
interface Marks {
  parent: string | null; // the line was its parent's up to here
  children: string[]; // forked from here
  picked: boolean; // a fork would start here
}

function MarksHere({ marks, at }: { marks: Marks | null; at: number }) {
  if (!marks) return null;
  return (
    <>
      {marks.parent !== null && <Divider parent={marks.parent} at={at} />}
      <Children ids={marks.children} at={at} />
      {marks.picked && <span class="caret" aria-hidden="true" />}
    </>
  );
}

interface BlockProps {
  spans: Span[];
  marks: Map<number, Marks>;
  version: number; // of the tree: names of parents and children may change
}

const sameBlock = (a: BlockProps, b: BlockProps) =>
  a.spans.length === b.spans.length &&
  a.spans.every((s, i) => s === b.spans[i]) &&
  a.marks.size === b.marks.size &&
  (a.marks.size === 0 || (a.version === b.version && JSON.stringify([...a.marks]) === JSON.stringify([...b.marks])));

const Block = memo(function Block({ spans, marks }: BlockProps) {
  return (
    <div class="block">
      {spans.map((s) => (
        <Fragment key={s.from}>
          {marks.has(s.from) && <MarksHere marks={marks.get(s.from)!} at={s.from} />}
          <span class={s.kind === "generated" ? "t g" : "t"} data-from={s.from}>
            {s.text}
          </span>
        </Fragment>
      ))}
    </div>
  );
}, sameBlock);

function ForkIcon() {
  return (
    <svg width="10" height="11" viewBox="0 0 10 11" fill="none" stroke="currentColor" stroke-width="1.3" aria-hidden="true">
      <path d="M2 8.5V2.5M2 6c0-2 6-1 6-3.5" />
      <circle cx="2" cy="9.2" r="1.3" />
    </svg>
  );
}

function Divider({ parent, at }: { parent: string; at: number }) {
  const known = forest.get(parent);
  return (
    <span class="divider">
      {known ? (
        <button type="button" class="link" onClick={() => select(parent)}>
          from {label(parent, known)}
        </button>
      ) : (
        "from a deleted session"
      )}
      {` up to token ${grouped(at)}`}
    </span>
  );
}

function Children({ ids, at }: { ids: string[]; at: number }) {
  const first = ids.find((id) => forest.get(id));
  if (!first) return null;
  const names = ids.map((id) => label(id, forest.get(id))).join(", ");
  return (
    <button type="button" class="branch" title={`Forked at token ${grouped(at)}: ${names}`} onClick={() => select(first)}>
      <span class="visually-hidden">Forks at token {at}: </span>
      <ForkIcon /> {ids.length}
    </button>
  );
}
