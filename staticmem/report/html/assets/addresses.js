// The address map: segments of the caching allocator from below, each as high as it is large, over the events of a step.

class Addresses {
  constructor(columns, settings, timeline) {
    Object.assign(this, settings.addresses);
    this.units = settings.units;
    this.columns = columns;
    this.timeline = timeline;
    this.length = this.events;
    this.peak = this.peak_at;
    this.home = [0, this.events];
    this.gap = 0;
    const { segment_size: sizes } = columns;
    this.base = new Float64Array(sizes.length); // where a segment begins on the vertical axis, in bytes
    let at = 0;
    sizes.forEach((size, row) => {
      this.base[row] = at;
      at += size * 512;
    });
    this.most = Math.max(at, 512);
    this.byRow = Array.from(sizes, () => []);
    columns.row.forEach((row, i) => this.byRow[row].push(i));
  }

  y(pen, bytes) {
    return pen.bottom - (bytes / this.most) * (pen.bottom - pen.top);
  }

  draw(pen) {
    const { ctx } = pen;
    ctx.clearRect(0, 0, pen.width, pen.height);
    drawPhases(pen, this.phases);
    this.axis(pen);
    this.blocks(pen);
    drawTicks(pen, "events of the allocator");
  }

  overview(pen) {
    pen.ctx.clearRect(0, 0, pen.width, pen.height);
    this.blocks(pen);
  }

  axis(pen) {
    const { ctx } = pen;
    const step = niceStep(this.most, 6, this.units);
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillStyle = colour("soft");
    for (let bytes = 0; bytes <= this.most; bytes += step) {
      ctx.fillText(axisLabel(bytes, step, this.units), pen.left - 8, this.y(pen, bytes));
    }
    ctx.textAlign = "left";
  }

  blocks(pen) {
    const { ctx } = pen;
    const { segment_size: sizes, segment_start: starts, segment_end: ends } = this.columns;
    const { row, offset, size, born, life } = this.columns;
    const span = (from, to) => [Math.max(pen.x(from), pen.left), Math.min(pen.x(to), pen.width)];
    ctx.fillStyle = colour("held");
    sizes.forEach((bytes, index) => {
      const [left, right] = span(starts[index], ends[index]);
      const top = this.y(pen, this.base[index] + bytes * 512);
      if (right > left) ctx.fillRect(left, top, right - left, Math.max(this.y(pen, this.base[index]) - top, 0.5));
    });
    const shades = new Map();
    for (let i = 0; i < row.length; i++) {
      const [left, right] = span(born[i], born[i] + life[i]);
      if (right <= left) continue;
      const name = this.category(i);
      if (!shades.has(name)) shades.set(name, name === "workspace" ? colour("workspace") : categoryColour(name));
      const low = this.base[row[i]] + offset[i] * 512;
      // on whole pixels: thousands of blocks of a part of one would mix with what is behind them
      const snap = (y) => Math.round(y * pen.ratio) / pen.ratio;
      const top = snap(this.y(pen, low + size[i] * 512));
      const bottom = Math.max(snap(this.y(pen, low)), top + 1 / pen.ratio);
      ctx.fillStyle = shades.get(name);
      const thick = bottom - top > 3 && !pen.plain ? 0.6 : 0; // a seam between blocks that are large enough to have one
      ctx.fillRect(left, top + thick, Math.max(right - left, 0.6), bottom - top - thick);
    }
    if (pen.plain) return;
    ctx.strokeStyle = colour("paper");
    ctx.beginPath();
    this.base.forEach((bytes, index) => {
      if (sizes[index] * 512 < this.most / 150) return;
      const y = Math.round(this.y(pen, bytes)) + 0.5;
      ctx.moveTo(pen.left, y);
      ctx.lineTo(pen.width, y);
    });
    ctx.stroke();
  }

  category(i) {
    const buffer = this.columns.buffer[i] - 1;
    if (buffer < 0 || this.timeline === null) return "workspace";
    return this.timeline.categories[this.timeline.columns.category[buffer]];
  }

  /** The segment at a height, or -1. */
  segmentAt(bytes) {
    const sizes = this.columns.segment_size;
    for (let row = sizes.length - 1; row >= 0; row--) {
      if (bytes >= this.base[row]) return bytes < this.base[row] + sizes[row] * 512 ? row : -1;
    }
    return -1;
  }

  at(tick, share) {
    const bytes = Math.max(share, 0) * this.most;
    const row = this.segmentAt(bytes);
    const { segment_start: starts, segment_end: ends, offset, size, born, life } = this.columns;
    if (row < 0 || tick < starts[row] || tick >= ends[row]) return this.nothing(tick, share);
    const inside = bytes - this.base[row];
    const block = this.byRow[row].find((i) => born[i] <= tick && tick < born[i] + life[i] &&
      offset[i] * 512 <= inside && inside < (offset[i] + size[i]) * 512);
    return block === undefined ? this.free(row, tick, share) : this.describe(block, tick, share);
  }

  step(found, by) {
    const { row, offset, born, life } = this.columns;
    const alive = [];
    for (let i = 0; i < row.length; i++) if (born[i] <= found.tick && found.tick < born[i] + life[i]) alive.push(i);
    alive.sort((a, b) => row[a] - row[b] || offset[a] - offset[b]);
    const at = found.block === undefined ? (by > 0 ? -1 : alive.length) : alive.indexOf(found.block);
    const next = alive[at + by];
    return next === undefined ? null : this.describe(next, found.tick, found.share);
  }

  segment(row) {
    const { segment_address: address, segment_size: size, segment_small: small } = this.columns;
    return `${formatBytes(size[row] * 512, this.units)} at 0x${(address[row] * 512).toString(16)}, ${small[row] ? "small" : "large"} pool`;
  }

  nothing(tick, share) {
    return { tick, share, title: "", rows: [], text: `event ${tick.toLocaleString("en-US")}: nothing is held here` };
  }

  free(row, tick, share) {
    const text = `event ${tick.toLocaleString("en-US")}: free in a segment of ${this.segment(row)}`;
    return { tick, share, title: "free", rows: [["segment", this.segment(row)]], text };
  }

  describe(i, tick, share) {
    const { row, offset, size, born, life, buffer, what } = this.columns;
    const known = this.timeline !== null && buffer[i] > 0 ? this.timeline.describe(buffer[i] - 1, 0, 0) : null;
    const title = known === null ? this.columns.strings.words[what[i] - 1] ?? "workspace" : known.title;
    const bytes = formatBytes(size[i] * 512, this.units);
    const rows = [
      ["block", `${bytes}, ${formatBytes(offset[i] * 512, this.units)} into the segment`], ["segment", this.segment(row[i])],
      ...(known === null ? [["category", "workspace"]] : known.rows.filter(([term]) => ["category", "op", "module", "type"].includes(term))),
      ["lifetime", `events ${born[i].toLocaleString("en-US")} to ${(born[i] + life[i]).toLocaleString("en-US")}`],
    ];
    return { tick, share, block: i, title, rows, text: `${title}: ${bytes} in a segment of ${this.segment(row[i])}` };
  }

  mark(pen, found) {
    if (found.block === undefined) return;
    const { row, offset, size, born, life } = this.columns;
    const i = found.block;
    const low = this.base[row[i]] + offset[i] * 512;
    const [left, right] = [Math.max(pen.x(born[i]), pen.left), Math.min(pen.x(born[i] + life[i]), pen.width)];
    const [top, bottom] = [this.y(pen, low + size[i] * 512), this.y(pen, low)];
    pen.ctx.strokeStyle = colour("ink");
    pen.ctx.lineWidth = 2;
    pen.ctx.strokeRect(left, top, Math.max(right - left, 2), Math.max(bottom - top, 2));
    pen.ctx.lineWidth = 1;
  }
}

function initAddresses(columns, settings, timeline) {
  const root = byId("address-chart");
  return columns === null || root === null ? null : new Chart(root, new Addresses(columns, settings, timeline));
}
