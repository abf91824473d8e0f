// A canvas over a range of ticks: zoom, pan, cursor, keyboard, overview. What is drawn comes from the chart's `source`:
//   length            ticks in all
//   home              [first, end) that is shown at the start
//   peak              a tick
//   draw(pen)         draws the body; pen has ctx, width, height, x(tick), first, end
//   overview(pen)     the same, small, over everything
//   mark(pen, found)  draws what was found at the cursor over the body
//   at(tick, share)   { title, rows, text } of what lies there; share is 0 at the bottom and 1 at the top
//   step(found, by)   the neighbour above (1) or below (-1), or null

const LEFT = 76; // room for the labels of the vertical axis
const TOP = 40; // and for the names of phases, and of the peak below them
const BOTTOM = 24;

class Chart {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.canvas = root.querySelector("canvas.main");
    this.small = root.querySelector("canvas.overview");
    this.tip = root.querySelector(".tip");
    this.now = root.querySelector(".now");
    [this.first, this.end] = source.home;
    this.cursor = source.peak;
    this.found = null;
    this.base = document.createElement("canvas");
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    themeListeners.push(() => this.redraw());
    addEventListener("beforeprint", () => this.redraw());
    this.redraw();
  }

  // -- geometry ------------------------------------------------------------------------------------------------

  pen(canvas, plain = false) {
    const ratio = window.devicePixelRatio || 1;
    const box = { width: canvas.clientWidth || 900, height: canvas.clientHeight || 300 };
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
    return this.penOn(canvas.getContext("2d"), box, ratio, plain);
  }

  penOn(ctx, box, ratio, plain) {
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const left = LEFT;
    const [first, end] = plain ? [0, this.source.length] : [this.first, this.end];
    const scale = (box.width - left) / Math.max(end - first, 1);
    return {
      ctx, first, end, left, ratio, width: box.width, height: box.height,
      plain, top: plain ? 0 : TOP, bottom: box.height - (plain ? 0 : BOTTOM),
      x: (tick) => left + (tick - first) * scale,
      tick: (x) => Math.floor(first + (x - left) / scale),
    };
  }

  redraw() {
    const body = this.pen(this.canvas);
    this.source.draw(body);
    this.base.width = this.canvas.width;
    this.base.height = this.canvas.height;
    if (this.base.width && this.base.height) this.base.getContext("2d").drawImage(this.canvas, 0, 0);
    const over = this.pen(this.small, true);
    this.source.overview(over);
    const { ctx } = over;
    ctx.fillStyle = colour("paper");
    ctx.globalAlpha = 0.72;
    ctx.fillRect(over.left, 0, over.x(this.first) - over.left, over.height);
    ctx.fillRect(over.x(this.end), 0, over.width - over.x(this.end), over.height);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = colour("ink");
    ctx.strokeRect(over.x(this.first) + 0.5, 0.5, Math.max(over.x(this.end) - over.x(this.first) - 1, 2), over.height - 1);
    this.overlay();
  }

  /** What changes with the cursor, over the drawing that does not. */
  overlay() {
    const box = { width: this.canvas.clientWidth || 900, height: this.canvas.clientHeight || 300 };
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (this.base.width && this.base.height) ctx.drawImage(this.base, 0, 0);
    const pen = this.penOn(ctx, box, window.devicePixelRatio || 1, false);
    if (this.found === null) return;
    this.source.mark(pen, this.found);
    if (this.cursor >= this.first && this.cursor < this.end) {
      ctx.strokeStyle = colour("ink");
      ctx.globalAlpha = 0.55;
      ctx.beginPath();
      const x = Math.round((pen.x(this.cursor) + pen.x(this.cursor + 1)) / 2) + 0.5;
      ctx.moveTo(x, pen.top);
      ctx.lineTo(x, pen.bottom);
      ctx.stroke();
      ctx.globalAlpha = 1;
    }
  }

  // -- what is shown -------------------------------------------------------------------------------------------

  show(first, end) {
    const length = this.source.length;
    const span = Math.min(Math.max(Math.round(end - first), 8), length);
    this.first = Math.min(Math.max(Math.round(first), 0), length - span);
    this.end = this.first + span;
    this.redraw();
  }

  /** Zooms by a factor (above 1: closer) around a tick, which stays where it is. */
  zoom(factor, around = (this.first + this.end) / 2) {
    const span = (this.end - this.first) / factor;
    const share = (around - this.first) / (this.end - this.first);
    this.show(around - span * share, around + span * (1 - share));
  }

  pan(ticks) {
    const span = this.end - this.first;
    const first = Math.min(Math.max(this.first + ticks, 0), this.source.length - span);
    this.show(first, first + span);
  }

  toPeak() {
    const span = Math.max(Math.min(this.end - this.first, Math.round(this.source.length / 8)), 40);
    this.show(this.source.peak - span / 2, this.source.peak + span / 2);
    this.point(this.source.peak, 0.5);
  }

  /** Puts the cursor on a tick; `share` is the height, 0 to 1, where something is looked for. */
  point(tick, share, x = null, y = null) {
    this.cursor = Math.min(Math.max(tick, 0), this.source.length - 1);
    this.set(this.source.at(this.cursor, share), x, y);
  }

  set(found, x = null, y = null) {
    this.found = found;
    this.now.textContent = found === null ? "" : found.text;
    this.tip.hidden = found === null || found.rows.length === 0;
    if (!this.tip.hidden) {
      const list = make("dl");
      for (const [term, text] of found.rows) list.append(make("dt", {}, term), make("dd", {}, make("bdi", {}, text)));
      this.tip.replaceChildren(make("p", { class: "title" }, make("bdi", {}, found.title)), list);
      this.place(x, y);
    }
    this.overlay();
  }

  place(x, y) {
    const width = this.canvas.clientWidth;
    const at = x ?? LEFT + ((this.cursor - this.first) / (this.end - this.first)) * (width - LEFT);
    const room = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(at + 16 + room < width ? at + 16 : at - room - 16, 0)}px`;
    const lowest = this.canvas.clientHeight - this.tip.offsetHeight - 4;
    this.tip.style.top = `${Math.max(Math.min((y ?? 30) - 20, lowest), 4)}px`;
  }

  // -- input ---------------------------------------------------------------------------------------------------

  listen() {
    const { canvas } = this;
    const spot = (event) => {
      const box = canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const pen = { first: this.first, end: this.end };
      const tick = Math.floor(pen.first + ((x - LEFT) / Math.max(box.width - LEFT, 1)) * (pen.end - pen.first));
      return { x, y, tick, share: (box.height - BOTTOM - y) / (box.height - BOTTOM - TOP) };
    };
    canvas.addEventListener("pointermove", (event) => {
      const { x, y, tick, share } = spot(event);
      if (this.drag && event.buttons) {
        const moved = Math.round(this.drag.tick - (x - LEFT) / this.drag.scale) - this.drag.first;
        if (moved) this.pan(this.drag.first + moved - this.first);
        return;
      }
      if (tick < this.first || tick >= this.end) this.set(null);
      else this.point(tick, share, x, y);
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") canvas.setPointerCapture(event.pointerId);
      const { x } = spot(event);
      const scale = (canvas.clientWidth - LEFT) / (this.end - this.first);
      this.drag = { first: this.first, tick: this.first + (x - LEFT) / scale, scale };
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.drag = null));
    canvas.addEventListener("pointerleave", () => !this.drag && this.set(null));
    canvas.addEventListener("dblclick", (event) => this.zoom(4, spot(event).tick));
    canvas.addEventListener(
      "wheel",
      (event) => {
        // a page that scrolls must not be caught by a chart on the way: the wheel zooms where the chart was chosen
        if (document.activeElement !== canvas && !event.ctrlKey) return;
        event.preventDefault();
        if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX / 900) * (this.end - this.first));
        else this.zoom(Math.exp(-event.deltaY / 400), spot(event).tick);
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const button of this.root.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => this.act(button.dataset.do));
    }
    this.listenOverview();
  }

  act(what) {
    if (what === "in") this.zoom(2, this.found ? this.cursor : undefined);
    else if (what === "out") this.zoom(0.5, this.found ? this.cursor : undefined);
    else if (what === "all") this.show(...this.source.home);
    else if (what === "peak") this.toPeak();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = this.end - this.first;
    const far = event.shiftKey ? Math.max(Math.round(span / 20), 1) : 1;
    const actions = {
      ArrowLeft: () => this.walk(-far), ArrowRight: () => this.walk(far),
      ArrowUp: () => this.climb(1), ArrowDown: () => this.climb(-1),
      PageUp: () => this.pan(-span / 2), PageDown: () => this.pan(span / 2),
      Home: () => this.walk(-this.source.length), End: () => this.walk(this.source.length),
      "+": () => this.act("in"), "=": () => this.act("in"), "-": () => this.act("out"),
      0: () => this.act("all"), p: () => this.act("peak"), P: () => this.act("peak"),
      Escape: () => { this.set(null); this.canvas.blur(); },
    };
    const action = actions[event.key];
    if (action === undefined) return;
    event.preventDefault();
    action();
  }

  walk(ticks) {
    const to = Math.min(Math.max(this.cursor + ticks, 0), this.source.length - 1);
    if (to < this.first || to >= this.end) this.pan(to - (this.first + this.end) / 2);
    const share = this.found?.share ?? 0.5;
    this.point(to, share);
  }

  climb(by) {
    const next = this.found === null ? this.source.at(this.cursor, 0) : this.source.step(this.found, by);
    if (next !== null) this.set(next);
  }

  listenOverview() {
    const { small } = this;
    let from = null;
    const tickAt = (event) => {
      const box = small.getBoundingClientRect();
      return ((event.clientX - box.left - LEFT) / Math.max(box.width - LEFT, 1)) * this.source.length;
    };
    small.addEventListener("pointerdown", (event) => {
      small.setPointerCapture(event.pointerId);
      from = tickAt(event);
    });
    small.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const to = tickAt(event);
      if (Math.abs(to - from) * (small.clientWidth / this.source.length) > 4) this.show(Math.min(from, to), Math.max(from, to));
    });
    small.addEventListener("pointerup", (event) => {
      const to = tickAt(event);
      if (from !== null && Math.abs(to - from) * (small.clientWidth / this.source.length) <= 4) {
        this.pan(to - (this.first + this.end) / 2);
      }
      from = null;
    });
  }
}

// -- shared drawing ----------------------------------------------------------------------------------------------

/** Phases as shades behind, with their names above. */
function drawPhases(pen, phases) {
  const { ctx } = pen;
  ctx.textBaseline = "middle";
  phases.forEach(([name, start, end], index) => {
    const left = Math.max(pen.x(start), pen.left);
    const right = Math.min(pen.x(end), pen.width);
    if (right <= left) return;
    if (index % 2 === 0) {
      ctx.fillStyle = colour("shade");
      ctx.fillRect(left, pen.top - 40, right - left, pen.bottom - pen.top + 40);
    }
    ctx.fillStyle = colour("soft");
    const said = name === "setup" ? "before the step" : name;
    if (ctx.measureText(said).width + 8 < right - left) ctx.fillText(said, left + 4, pen.top - 30);
  });
}

/** A round step for about `count` lines up to `most`, in the units of the page. */
function niceStep(most, count, units) {
  const base = units === "binary" ? 2 ** (10 * Math.max(Math.floor(Math.log2(Math.max(most, 1)) / 10), 0)) : 1;
  const raw = most / count / base;
  const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1e-9)));
  const factor = [1, 2, 2.5, 5, 10].find((f) => f * power >= raw) ?? 10;
  return factor * power * base;
}

/** Bytes on an axis: as many digits as the step needs. */
function axisLabel(bytes, step, units) {
  if (bytes === 0) return "0";
  for (let digits = 0; digits < 3; digits++) {
    const text = formatBytes(bytes, units, digits);
    if (units === "bytes" || parseFloat(text.replace(/,/g, "")) === parseFloat(formatBytes(bytes, units, 6).replace(/,/g, ""))) return text;
  }
  return formatBytes(bytes, units, 2);
}

/** The axis of ticks below. */
function drawTicks(pen, unit) {
  const { ctx } = pen;
  ctx.fillStyle = colour("soft");
  ctx.strokeStyle = colour("strong-line");
  ctx.beginPath();
  ctx.moveTo(pen.left, pen.bottom + 0.5);
  ctx.lineTo(pen.width, pen.bottom + 0.5);
  ctx.stroke();
  ctx.textBaseline = "top";
  const step = Math.max(niceStep(pen.end - pen.first, 8, "bytes"), 1);
  let free = pen.left + ctx.measureText(unit).width + 14;
  ctx.fillText(unit, pen.left, pen.bottom + 7);
  for (let tick = Math.ceil(pen.first / step) * step; tick < pen.end; tick += step) {
    const said = tick.toLocaleString("en-US");
    const width = ctx.measureText(said).width;
    const at = pen.x(tick) - width / 2;
    if (at < free || at + width > pen.width) continue;
    ctx.fillText(said, at, pen.bottom + 7);
    free = at + width + 12;
  }
}
