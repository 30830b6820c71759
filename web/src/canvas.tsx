// The tree as a picture: drag or scroll to move, pinch or Ctrl-scroll to zoom, click to select.
// Everything that it does can be done in the list beside it, so it is a picture to screen readers.

import { useEffect, useRef, useState } from "preact/hooks";
import { label } from "./forest";
import { fit, hit, layoutOf, opening, reveal, zoomAt, type Layout, type View } from "./layout";
import { grouped, paint, readTheme, type Theme } from "./painter";
import { forest, select, selectedId, treeStructure, treeVersion } from "./store";
import { themeVersion } from "./theme";

const relayoutPauseMillis = 300; // at least, between two layouts of a large tree
const largeTree = 1500;
const clickSlop = 4; // pixels that a click may move

class Viewer {
  layout: Layout = layoutOf(forest);
  view: View = { x: -24, y: -24, scale: 1 };
  hovered: string | null = null;
  drawn = 0;
  private theme: Theme;
  private structure = -1;
  private laidOut = 0;
  private touched = false; // a person moved the view: no more automatic fit
  private frame = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly observer: ResizeObserver;
  private width = 0;
  private height = 0;
  private pointers = new Map<number, { x: number; y: number }>();
  private moved = 0;

  constructor(
    readonly canvas: HTMLCanvasElement,
    readonly onHover: (id: string | null, x: number, y: number) => void,
  ) {
    this.theme = readTheme(canvas);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(canvas);
    canvas.addEventListener("wheel", this.wheel, { passive: false });
    canvas.addEventListener("pointerdown", this.down);
    canvas.addEventListener("pointermove", this.move);
    canvas.addEventListener("pointerup", this.up);
    canvas.addEventListener("pointercancel", this.up);
    canvas.addEventListener("pointerleave", () => this.hover(null, 0, 0));
  }

  stop(): void {
    this.observer.disconnect();
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
  }

  readColours(): void {
    this.theme = readTheme(this.canvas);
    this.draw();
  }

  private resize(): void {
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    if (!this.touched) this.open();
    this.draw();
  }

  /** Follows the forest; a large tree is laid out at most a few times a second. */
  update(): void {
    if (this.structure !== forest.structure) {
      const wait = forest.nodes.size > largeTree ? this.laidOut + relayoutPauseMillis - performance.now() : 0;
      if (wait > 0) {
        this.timer ??= setTimeout(() => {
          this.timer = undefined;
          this.update();
        }, wait);
      } else {
        this.structure = forest.structure;
        this.layout = layoutOf(forest);
        this.laidOut = performance.now();
        if (!this.touched) this.open();
      }
    }
    this.draw();
  }

  /** Until a person moves it, the view keeps to what is readable and holds the selection. */
  private open(): void {
    this.view = opening(this.layout, this.width, this.height);
    if (selectedId.value) this.show(selectedId.value);
  }

  fit(): void {
    this.touched = true;
    this.view = fit(this.layout, this.width, this.height);
    this.draw();
  }

  zoom(factor: number, x = this.width / 2, y = this.height / 2): void {
    this.touched = true;
    this.view = zoomAt(this.view, factor, x, y);
    this.draw();
  }

  show(id: string): void {
    const at = this.layout.index.get(id);
    const placed = at === undefined ? undefined : this.layout.placed[at];
    if (placed && this.width > 0) this.view = reveal(this.view, placed, this.width, this.height);
    this.draw();
  }

  draw(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const ctx = this.canvas.getContext("2d");
      if (!ctx || this.width === 0) return;
      this.drawn = paint(ctx, {
        forest,
        layout: this.layout,
        view: this.view,
        theme: this.theme,
        selected: selectedId.value,
        hovered: this.hovered,
        width: this.width,
        height: this.height,
        ratio: devicePixelRatio || 1,
      });
      this.canvas.dataset["drawn"] = String(this.drawn); // for tests: what was in view
    });
  }

  private at(event: { offsetX: number; offsetY: number }): string | null {
    return hit(this.layout, this.view.x + event.offsetX / this.view.scale, this.view.y + event.offsetY / this.view.scale);
  }

  private hover(id: string | null, x: number, y: number): void {
    if (this.hovered !== id) {
      this.hovered = id;
      this.canvas.classList.toggle("over-node", id !== null);
      this.draw();
    }
    this.onHover(id, x, y);
  }

  private wheel = (event: WheelEvent): void => {
    event.preventDefault();
    const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    if (event.ctrlKey || event.metaKey) {
      this.zoom(Math.exp(-event.deltaY * unit * 0.005), event.offsetX, event.offsetY);
      return;
    }
    const [dx, dy] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
    this.pan(-dx * unit, -dy * unit);
  };

  private pan(dx: number, dy: number): void {
    this.touched = true;
    this.view = { ...this.view, x: this.view.x - dx / this.view.scale, y: this.view.y - dy / this.view.scale };
    this.draw();
  }

  private down = (event: PointerEvent): void => {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.moved = this.pointers.size > 1 ? clickSlop + 1 : 0;
  };

  private move = (event: PointerEvent): void => {
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.hover(this.at(event), event.offsetX, event.offsetY);
      return;
    }
    const now = { x: event.offsetX, y: event.offsetY };
    const dx = now.x - before.x;
    const dy = now.y - before.y;
    this.moved += Math.abs(dx) + Math.abs(dy);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const was = Math.hypot(before.x - other.x, before.y - other.y);
      const is = Math.hypot(now.x - other.x, now.y - other.y);
      if (was > 0) this.zoom(is / was, (now.x + other.x) / 2, (now.y + other.y) / 2);
      this.pan(dx / 2, dy / 2);
    } else if (this.moved > clickSlop) {
      this.pan(dx, dy);
    }
    this.pointers.set(event.pointerId, now);
  };

  private up = (event: PointerEvent): void => {
    if (!this.pointers.delete(event.pointerId)) return;
    if (event.type === "pointerup" && this.moved <= clickSlop) {
      const id = this.at(event);
      if (id && forest.get(id)) {
        this.touched = true; // the view stays where the person clicked
        select(id);
      }
    }
  };
}

export function TreeCanvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const viewer = useRef<Viewer | null>(null);
  const [tip, setTip] = useState<{ id: string; x: number; y: number } | null>(null);

  useEffect(() => {
    const v = new Viewer(canvas.current!, (id, x, y) => setTip(id ? { id, x, y } : null));
    viewer.current = v;
    v.update();
    const stops = [
      treeVersion.subscribe(() => v.update()),
      treeStructure.subscribe(() => v.update()),
      themeVersion.subscribe(() => v.readColours()),
      selectedId.subscribe((id) => (id ? v.show(id) : v.draw())),
    ];
    return () => {
      for (const stop of stops) stop();
      v.stop();
    };
  }, []);

  treeVersion.value; // the tip and the count below change with it
  const session = tip ? forest.get(tip.id) : null;
  return (
    <section class="canvas-pane" aria-label="Tree picture">
      <canvas ref={canvas} role="img" aria-label={`Tree of ${forest.size} sessions; the list beside it has the same content`} />
      <div class="canvas-tools" role="group" aria-label="Zoom">
        <button type="button" class="icon" onClick={() => viewer.current?.zoom(1.3)} aria-label="Zoom in" title="Zoom in (Ctrl + scroll)">
          +
        </button>
        <button type="button" class="icon" onClick={() => viewer.current?.zoom(1 / 1.3)} aria-label="Zoom out" title="Zoom out (Ctrl + scroll)">
          −
        </button>
        <button type="button" onClick={() => viewer.current?.fit()} title="Show the whole tree">
          Fit
        </button>
      </div>
      <Legend />
      {tip && session && (
        <div class="tip" style={{ left: `${tip.x + 14}px`, top: `${tip.y + 14}px` }} aria-hidden="true">
          <strong>{label(tip.id, session)}</strong>
          <span>
            {session.state} · {grouped(session.length)} tokens
            {session.forked_at !== null && ` · forked at ${grouped(session.forked_at)}`}
          </span>
          <span>
            device {grouped(session.residency.device)} · host {grouped(session.residency.host)} · disk {grouped(session.residency.disk)}
          </span>
        </div>
      )}
    </section>
  );
}

function Legend() {
  return (
    <div class="legend" aria-hidden="true">
      {["idle", "running", "detached", "closed"].map((state) => (
        <span key={state}>
          <i class={`dot ${state}`} />
          {state}
        </span>
      ))}
      <span class="sep" />
      {["device", "host", "disk"].map((tier) => (
        <span key={tier}>
          <i class={`bar ${tier}`} />
          {tier}
        </span>
      ))}
    </div>
  );
}
