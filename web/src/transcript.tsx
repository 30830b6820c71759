// The line of the selected session as text, one element a token (or a delta, until its tokens are known).

import { memo } from "./memo";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Follower } from "./follower";
import { label, type Node } from "./forest";
import type { Span } from "./line";
import { grouped } from "./painter";
import { forest, select, treeVersion } from "./store";

const blockTokens = 96; // spans that are drawn anew together
const stickPixels = 60; // so near the end, the view follows new text

interface Props {
  follower: Follower;
  picked: number | null; // the offset that a fork would start at
  onPick: (at: number | null) => void;
}

/** Blocks of equal spans, so that a new token redraws one block and not the whole line. */
function blocksOf(spans: Span[], cuts: number[]): Span[][] {
  const blocks: Span[][] = [];
  let block: Span[] = [];
  let nextCut = 0;
  for (const span of spans) {
    while (nextCut < cuts.length && cuts[nextCut]! < span.from) nextCut++;
    if (block.length >= blockTokens || (block.length > 0 && cuts[nextCut] === span.from)) {
      blocks.push(block);
      block = [];
    }
    block.push(span);
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
  const [marks, setMarks] = useState(false); // draw the boundaries of tokens
  const [hovered, setHovered] = useState<Span | null>(null);
  const [busy, setBusy] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  const sticks = useRef(true);
  const session = forest.get(follower.id);
  const forkedAt = session?.forked_at ?? null;

  const children = useMemo(() => childrenAt(follower.id), [follower, tree]);
  const blocks = useMemo(() => {
    const cuts = [...children.keys()];
    if (forkedAt !== null) cuts.push(forkedAt);
    if (picked !== null) cuts.push(picked);
    return blocksOf(follower.line.spans, cuts.sort((a, b) => a - b));
  }, [version, follower, children, forkedAt, picked]);

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
        class={`transcript${marks ? " marks" : ""}`}
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
        {blocks.map((block) => {
          const from = block[0]!.from;
          return (
            <>
              {from === forkedAt && <Divider key={`d${from}`} parent={session?.parent_id ?? ""} at={from} />}
              <Children key={`c${from}`} nodes={children.get(from)} at={from} />
              {from === picked && <span key="caret" class="caret" aria-hidden="true" />}
              <Block key={from} spans={block} />
            </>
          );
        })}
        {end === forkedAt && end > 0 && <Divider parent={session?.parent_id ?? ""} at={end} />}
        <Children nodes={children.get(end)} at={end} />
        {picked === end && end > 0 && <span class="caret" aria-hidden="true" />}
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
          <input type="checkbox" checked={marks} onChange={(e) => setMarks(e.currentTarget.checked)} />
          Token boundaries
        </label>
      </div>
    </div>
  );
}

const Block = memo(
  function Block({ spans }: { spans: Span[] }) {
    return (
      <span>
        {spans.map((s) => (
          <span key={s.from} class={s.kind === "generated" ? "t g" : "t"} data-from={s.from}>
            {s.text}
          </span>
        ))}
      </span>
    );
  },
  (a, b) => a.spans.length === b.spans.length && a.spans.every((s, i) => s === b.spans[i]),
);

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

function Children({ nodes, at }: { nodes: Node[] | undefined; at: number }) {
  const first = nodes?.find((n) => n.session);
  if (!first) return null;
  const names = nodes!.map((n) => label(n.id, n.session)).join(", ");
  return (
    <button type="button" class="branch" title={`Forked at token ${grouped(at)}: ${names}`} onClick={() => select(first.id)}>
      <span class="visually-hidden">Forks at token {at}: </span><ForkIcon /> {nodes!.length}
    </button>
  );
}
