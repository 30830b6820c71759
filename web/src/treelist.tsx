// The tree as a list: the keyboard's and the screen reader's way in, with only the rows in view in the page.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { label } from "./forest";
import { grouped } from "./painter";
import { moveTo, rowsOf, type Row } from "./rows";
import { forest, loaded, select, selectedId, treeVersion, truncated } from "./store";

const rowHeight = 30; // CSS pixels; style.css has the same
const overscan = 8;
const indentMax = 10; // deeper levels are told by aria-level only

export function TreeList() {
  const [filter, setFilter] = useState("");
  const [collapsed, setCollapsed] = useState<ReadonlySet<string>>(new Set());
  const [active, setActive] = useState<string | null>(null);
  const [scroll, setScroll] = useState(0);
  const [height, setHeight] = useState(600);
  const box = useRef<HTMLDivElement>(null);
  const version = treeVersion.value;
  const rows = useMemo(() => rowsOf(forest, collapsed, filter), [version, collapsed, filter]);
  const selected = selectedId.value;

  useEffect(() => {
    const observer = new ResizeObserver(() => setHeight(box.current?.clientHeight ?? 600));
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);

  const reveal = (id: string | null) => {
    const at = rows.findIndex((r) => r.id === id);
    const el = box.current;
    if (at < 0 || !el) return;
    const top = at * rowHeight;
    if (top < el.scrollTop) el.scrollTop = top;
    else if (top + rowHeight > el.scrollTop + el.clientHeight) el.scrollTop = top + rowHeight - el.clientHeight;
  };

  useEffect(() => {
    if (!selected) return;
    setActive(selected);
    // A selection made elsewhere may be inside something closed.
    const closed = forest.path(selected).filter((n) => n.id !== selected && collapsed.has(n.id));
    if (closed.length > 0) setCollapsed(new Set([...collapsed].filter((id) => !closed.some((n) => n.id === id))));
    reveal(selected);
  }, [selected]);

  const toggle = (id: string, open: boolean) => {
    const next = new Set(collapsed);
    if (open) next.delete(id);
    else next.add(id);
    setCollapsed(next);
  };

  const onKey = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = rows.find((r) => r.id === active);
    let next = moveTo(rows, active, event.key, Math.max(1, Math.floor(height / rowHeight) - 1));
    if (event.key === "ArrowRight" && row?.expandable) {
      if (row.expanded) next = rows[rows.indexOf(row) + 1]?.id ?? null;
      else toggle(row.id, true);
    } else if (event.key === "ArrowLeft" && row) {
      if (row.expanded) toggle(row.id, false);
      else next = row.node.parent;
    } else if ((event.key === "Enter" || event.key === " ") && row?.node.session) {
      select(row.id);
    } else if (next === null) {
      return;
    }
    event.preventDefault();
    if (next !== null) {
      setActive(next);
      reveal(next);
    }
  };

  const first = Math.max(0, Math.floor(scroll / rowHeight) - overscan);
  const last = Math.min(rows.length, Math.ceil((scroll + height) / rowHeight) + overscan);
  const inView = rows.slice(first, last);
  const activeIn = active !== null && inView.some((r) => r.id === active);

  return (
    <section class="list-pane" aria-label="Sessions">
      <div class="list-head">
        <input
          type="search"
          placeholder="Filter by title, id, state, label"
          aria-label="Filter sessions"
          value={filter}
          onInput={(e) => setFilter(e.currentTarget.value)}
        />
      </div>
      <div
        class="tree"
        role="tree"
        aria-label="Sessions"
        tabIndex={0}
        ref={box}
        aria-activedescendant={activeIn ? `row-${active}` : undefined}
        onKeyDown={onKey}
        onFocus={() => active === null && rows[0] && setActive(selected ?? rows[0].id)}
        onScroll={(e) => setScroll(e.currentTarget.scrollTop)}
      >
        <div class="tree-space" role="presentation" style={{ height: `${rows.length * rowHeight}px` }}>
          {inView.map((row, i) => (
            <TreeRow
              key={row.id}
              row={row}
              top={(first + i) * rowHeight}
              active={row.id === active}
              selected={row.id === selected}
              onToggle={() => toggle(row.id, !row.expanded)}
              onPick={() => {
                setActive(row.id);
                if (row.node.session) select(row.id);
              }}
            />
          ))}
        </div>
      </div>
      {rows.length === 0 && loaded.value && (
        <p class="empty">{filter ? "Nothing matches the filter." : "No sessions yet. Make one with New session."}</p>
      )}
      {truncated.value && <p class="empty">Older sessions are left out of this page.</p>}
    </section>
  );
}

interface RowProps {
  row: Row;
  top: number;
  active: boolean;
  selected: boolean;
  onToggle: () => void;
  onPick: () => void;
}

function TreeRow({ row, top, active, selected, onToggle, onPick }: RowProps) {
  const s = row.node.session;
  const indent = Math.min(row.level - 1, indentMax) * 14;
  return (
    <div
      id={`row-${row.id}`}
      class={`row${active ? " active" : ""}${s ? "" : " ghost"}`}
      role="treeitem"
      aria-level={row.level}
      aria-posinset={row.position}
      aria-setsize={row.siblings}
      aria-expanded={row.expandable ? row.expanded : undefined}
      aria-selected={selected}
      style={{ transform: `translateY(${top}px)`, paddingLeft: `${8 + indent}px` }}
      onClick={onPick}
    >
      <span
        class={`twist${row.expandable ? (row.expanded ? " open" : "") : " none"}`}
        aria-hidden="true"
        onClick={(e) => {
          e.stopPropagation();
          if (row.expandable) onToggle();
        }}
      />
      <i class={`dot ${s ? s.state : "ghost"}`} aria-hidden="true" />
      <span class="row-title">{label(row.id, s)}</span>
      {s && (
        <span class="row-meta">
          <span class="visually-hidden">, {s.state}, </span>
          {grouped(s.length)}
          <span class="visually-hidden"> tokens</span>
        </span>
      )}
    </div>
  );
}
