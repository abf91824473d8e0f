// The memory of the step: every buffer, stacked by category. Sizes are in bytes, time in ticks.

const CATEGORY_COLOURS = {
  parameter: "parameter", buffer: "buffer", optimizer_state: "optimizer", input: "input", gradient: "gradient",
  activation: "activation", temporary: "temporary", communication: "communication",
};
const categoryColour = (name) => colour(CATEGORY_COLOURS[name] ?? "rounding");
const categoryName = (name) => name.replace(/_/g, " ");

class Timeline {
  constructor(columns, settings) {
    Object.assign(this, settings.timeline);
    this.units = settings.units;
    this.words = columns.strings.words;
    this.columns = columns;
    this.length = this.ticks;
    this.peak = this.peak_tick;
    this.count = columns.born.length;
    const order = [...settings.order, ...this.categories.filter((name) => !settings.order.includes(name))];
    this.order = order.map((name) => this.categories.indexOf(name)).filter((index) => index >= 0);
    this.hidden = new Set();
    this.capacity = null;
    this.limits = [];
    const step = this.phases.find(([name]) => name !== "setup");
    this.home = [step && step[1] <= this.peak ? step[1] : 0, this.ticks];
    this.build();
  }

  build() {
    const { born, life, size, category, kernel } = this.columns;
    this.levels = this.categories.map(() => new Float64Array(this.ticks + 1));
    this.members = this.categories.map(() => []);
    this.died = new Float64Array(this.count);
    this.kernelAt = new Int32Array(this.ticks).fill(-1);
    for (let i = 0; i < this.count; i++) {
      this.died[i] = born[i] + life[i];
      const level = this.levels[category[i]];
      level[born[i]] += size[i] * 512;
      level[this.died[i]] -= size[i] * 512;
      this.members[category[i]].push(i);
      this.kernelAt[born[i]] = kernel[i];
    }
    for (let t = 1; t < this.ticks; t++) if (this.kernelAt[t] < 0) this.kernelAt[t] = this.kernelAt[t - 1];
    for (const level of this.levels) for (let t = 1; t < this.ticks; t++) level[t] += level[t - 1];
    this.sum();
  }

  /** Totals of what is not hidden. */
  sum() {
    this.total = new Float64Array(this.ticks);
    for (const index of this.order) {
      if (this.hidden.has(index)) continue;
      const level = this.levels[index];
      for (let t = 0; t < this.ticks; t++) this.total[t] += level[t];
    }
    this.most = this.total.reduce((most, value) => Math.max(most, value), 0);
  }

  get ceiling() {
    return Math.max(this.most, this.capacity?.bytes ?? 0, 512) * 1.06;
  }

  // -- drawing -------------------------------------------------------------------------------------------------

  draw(pen) {
    const { ctx } = pen;
    ctx.clearRect(0, 0, pen.width, pen.height);
    drawPhases(pen, this.phases);
    this.grid(pen);
    this.area(pen, true);
    this.lines(pen);
    drawTicks(pen, "allocations and releases");
  }

  overview(pen) {
    pen.ctx.clearRect(0, 0, pen.width, pen.height);
    this.area(pen, false);
  }

  y(pen, bytes) {
    return pen.bottom - (bytes / this.ceiling) * (pen.bottom - pen.top);
  }

  grid(pen) {
    const { ctx } = pen;
    const step = niceStep(this.ceiling, 6, this.units);
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (let bytes = 0; bytes <= this.ceiling; bytes += step) {
      const y = Math.round(this.y(pen, bytes)) + 0.5;
      ctx.strokeStyle = colour("line");
      ctx.beginPath();
      ctx.moveTo(pen.left, y);
      ctx.lineTo(pen.width, y);
      ctx.stroke();
      ctx.fillStyle = colour("soft");
      ctx.fillText(axisLabel(bytes, step, this.units), pen.left - 8, y);
    }
    ctx.textAlign = "left";
  }

  /** The tick of each column of pixels: the one with the most memory in it, so that no peak is lost. */
  *columnsOf(pen) {
    const width = 1 / pen.ratio > 0.75 ? 1 : 0.5;
    for (let x = pen.left; x < pen.width; x += width) {
      const from = Math.max(pen.tick(x), 0);
      const to = Math.min(Math.max(pen.tick(x + width), from + 1), this.ticks);
      if (from >= this.ticks) return;
      let best = from;
      for (let t = from + 1; t < to; t++) if (this.total[t] > this.total[best]) best = t;
      yield [x, width, best];
    }
  }

  area(pen, detailed) {
    const { ctx } = pen;
    const cells = [...this.columnsOf(pen)];
    const heights = new Float64Array(cells.length).fill(0);
    for (const index of this.order) {
      if (this.hidden.has(index)) continue;
      ctx.fillStyle = categoryColour(this.categories[index]);
      const level = this.levels[index];
      cells.forEach(([x, width, tick], i) => {
        const bytes = level[tick];
        if (!bytes) return;
        const top = this.y(pen, heights[i] + bytes);
        ctx.fillRect(x, top, width + 0.25, this.y(pen, heights[i]) - top);
        heights[i] += bytes;
      });
    }
    if (detailed) this.seams(pen, cells);
  }

  /** Lines between the larger tensors of a stack. */
  seams(pen, cells) {
    const least = (this.ceiling / (pen.bottom - pen.top)) * 5; // bytes of five pixels
    const { born, size } = this.columns;
    const below = new Float64Array(cells.length);
    if (this.count * 4 > 400_000) return; // too many to go through at every move
    pen.ctx.fillStyle = colour("paper");
    pen.ctx.globalAlpha = 0.38;
    for (const index of this.order) {
      if (this.hidden.has(index)) continue;
      const offsets = below.slice();
      for (const i of this.members[index]) {
        const [from, to] = this.cellsOf(cells, born[i], this.died[i]);
        const bytes = size[i] * 512;
        for (let c = from; c < to; c++) {
          if (bytes >= least) pen.ctx.fillRect(cells[c][0], this.y(pen, offsets[c]) - 0.6, cells[c][1] + 0.25, 0.6);
          offsets[c] += bytes;
        }
      }
      const level = this.levels[index];
      cells.forEach(([, , tick], c) => (below[c] += level[tick]));
    }
    pen.ctx.globalAlpha = 1;
  }

  /** The columns [from, to) whose ticks lie in [born, died); their ticks rise. */
  cellsOf(cells, born, died) {
    const find = (tick) => {
      let [low, high] = [0, cells.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (cells[middle][2] < tick) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    return [find(born), find(died)];
  }

  lines(pen) {
    const { ctx } = pen;
    for (const { bytes, name } of this.limits.filter(({ bytes }) => bytes < this.ceiling)) {
      const y = Math.round(this.y(pen, bytes)) + 0.5;
      this.dashed(pen, [pen.left, y, pen.width, y], colour("bad"));
      ctx.fillStyle = colour("bad");
      ctx.textBaseline = "bottom";
      ctx.textAlign = "right";
      ctx.fillText(`${name}: ${formatBytes(bytes, this.units)} usable`, pen.width - 6, y - 2);
      ctx.textAlign = "left";
    }
    const x = Math.round((pen.x(this.peak) + pen.x(this.peak + 1)) / 2) + 0.5;
    if (x < pen.left || x > pen.width) return;
    this.dashed(pen, [x, pen.top, x, pen.bottom], colour("ink"));
    const said = `peak ${formatBytes(this.total[this.peak], this.units)}`;
    const width = ctx.measureText(said).width;
    const at = Math.min(Math.max(x - width / 2, pen.left), pen.width - width);
    ctx.fillStyle = colour("ink");
    ctx.textBaseline = "middle";
    ctx.fillText(said, at, pen.top - 10);
  }

  dashed({ ctx }, [x0, y0, x1, y1], stroke) {
    ctx.strokeStyle = stroke;
    ctx.setLineDash([5, 4]);
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.lineTo(x1, y1);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  // -- what lies where -----------------------------------------------------------------------------------------

  at(tick, share) {
    const wanted = Math.max(share, 0) * this.ceiling;
    let below = 0;
    for (const index of this.order) {
      if (this.hidden.has(index)) continue;
      const level = this.levels[index][tick];
      if (wanted < below + level) return this.inStack(index, tick, wanted - below, share);
      below += level;
    }
    return this.moment(tick, share);
  }

  inStack(index, tick, wanted, share) {
    const { born, size } = this.columns;
    let below = 0;
    for (const i of this.members[index]) {
      if (born[i] > tick) break;
      if (tick >= this.died[i]) continue;
      below += size[i] * 512;
      if (wanted < below) return this.describe(i, tick, share);
    }
    return this.moment(tick, share);
  }

  step(found, by) {
    const tick = found.tick;
    const alive = this.order.filter((index) => !this.hidden.has(index)).flatMap((index) =>
      this.members[index].filter((i) => this.columns.born[i] <= tick && tick < this.died[i] && this.columns.size[i]));
    const at = found.buffer === undefined ? (by > 0 ? -1 : alive.length) : alive.indexOf(found.buffer);
    const next = alive[at + by];
    return next === undefined ? null : this.describe(next, tick, found.share);
  }

  place(tick) {
    if (this.phaseOf(tick) === "before the step") return "what exists before";
    const kernel = this.kernelAt[Math.min(Math.max(tick, 0), this.ticks - 1)];
    if (kernel < 0) return "";
    const module = this.words[this.columns.kernel_module[kernel]];
    const name = this.words[this.columns.kernel_name[kernel]];
    return module ? `${name} in ${module}` : name;
  }

  phaseOf(tick) {
    const found = this.phases.find(([, start, end]) => start <= tick && tick < end);
    return found === undefined || found[0] === "setup" ? "before the step" : found[0];
  }

  moment(tick, share) {
    const rows = this.order.filter((index) => this.levels[index][tick]).reverse()
      .map((index) => [categoryName(this.categories[index]), formatBytes(this.levels[index][tick], this.units)]);
    const title = `${formatBytes(this.total[tick], this.units)} alive`;
    const text = `${this.phaseOf(tick)}, event ${tick.toLocaleString("en-US")}: ${title}, ${this.place(tick)}`;
    return { tick, share, title, rows: [["at", `${this.phaseOf(tick)}: ${this.place(tick)}`], ...rows], text };
  }

  describe(i, tick, share) {
    const { born, size, category, name, module, dtype, shape, kernel, kernel_name: kernels } = this.columns;
    const word = (index) => this.words[index];
    const bytes = formatBytes(size[i] * 512, this.units);
    const type = `${word(dtype[i])}[${word(shape[i])}]`;
    const start = `${this.phaseOf(born[i])}, event ${born[i].toLocaleString("en-US")}`;
    const lasts = this.died[i] >= this.ticks;
    const end = lasts ? "outlives the step"
      : `${this.phaseOf(this.died[i])}, event ${this.died[i].toLocaleString("en-US")}, after ${this.place(this.died[i])}`;
    const made = born[i] < (this.phases.find(([phase]) => phase !== "setup")?.[1] ?? 0) ? "before the step" : word(kernels[kernel[i]]);
    const rows = [
      ["size", `${bytes} (${(size[i] * 512).toLocaleString("en-US")} B)`], ["category", categoryName(this.categories[category[i]])],
      ["op", made], ["module", word(module[i]) || "the model itself"], ["type", type], ["from", start], ["until", end],
      ["lifetime", `${(this.died[i] - born[i]).toLocaleString("en-US")} of ${this.ticks.toLocaleString("en-US")} events`],
    ];
    const title = word(name[i]);
    const text = `${title}: ${bytes}, ${categoryName(this.categories[category[i]])}, ${type}, from ${start} until ${end}; ` +
      `${formatBytes(this.total[tick], this.units)} alive in all`;
    return { tick, share, buffer: i, title, rows, text };
  }

  /** The buffer under the cursor over its whole life. */
  mark(pen, found) {
    const i = found.buffer;
    if (i === undefined) return;
    const { born, size, category } = this.columns;
    const cells = [...this.columnsOf(pen)];
    const [from, to] = this.cellsOf(cells, born[i], this.died[i]);
    if (from >= to) return;
    const offsets = new Float64Array(cells.length);
    for (const index of this.order) {
      if (index === category[i]) break;
      if (!this.hidden.has(index)) for (let c = from; c < to; c++) offsets[c] += this.levels[index][cells[c][2]];
    }
    for (const other of this.members[category[i]]) {
      if (other >= i) break;
      const [start, end] = this.cellsOf(cells, born[other], this.died[other]);
      for (let c = Math.max(start, from); c < Math.min(end, to); c++) offsets[c] += size[other] * 512;
    }
    const { ctx } = pen;
    ctx.beginPath();
    const top = (c) => this.y(pen, offsets[c] + size[i] * 512);
    const bottom = (c) => Math.max(this.y(pen, offsets[c]), top(c) + 1.5);
    ctx.moveTo(cells[from][0], bottom(from));
    for (let c = from; c < to; c++) { ctx.lineTo(cells[c][0], top(c)); ctx.lineTo(cells[c][0] + cells[c][1], top(c)); }
    for (let c = to - 1; c >= from; c--) { ctx.lineTo(cells[c][0] + cells[c][1], bottom(c)); ctx.lineTo(cells[c][0], bottom(c)); }
    ctx.closePath();
    ctx.globalAlpha = 0.35;
    ctx.fillStyle = colour("ink");
    ctx.fill();
    ctx.globalAlpha = 1;
    ctx.strokeStyle = colour("ink");
    ctx.lineWidth = 1.5;
    ctx.stroke();
    ctx.lineWidth = 1;
  }
}

/** Capacities that differ by less than a hundredth are one line with the names of all. */
function capacities(cards) {
  const groups = [];
  for (const [name, bytes] of cards) {
    const last = groups.at(-1);
    if (last !== undefined && bytes <= last.bytes * 1.01) last.more += 1;
    else groups.push({ name, bytes, more: 0 });
  }
  return groups.map(({ name, bytes, more }) => ({ name: more ? `${name} (and ${more} alike)` : name, bytes }));
}

function initTimeline(columns, settings) {
  const root = byId("timeline-chart");
  if (columns === null || root === null) return null;
  const source = new Timeline(columns, settings);
  const asked = settings.cards.find(([name]) => name === settings.asked);
  const known = capacities(settings.cards.filter((card) => card !== asked));
  if (asked !== undefined) known.push({ name: asked[0], bytes: asked[1] });
  known.sort((a, b) => a.bytes - b.bytes);
  // a card with room to spare would press the curve flat: then its line is there for those who choose it
  const fair = ({ bytes }) => bytes <= settings.peak_bytes * 2.5;
  const wanted = asked === undefined
    ? known.find(({ bytes }) => bytes >= settings.peak_bytes)
    : known.find(({ name }) => name === asked[0]);
  const chosen = wanted !== undefined && fair(wanted) ? wanted : undefined;
  const select = byId("capacity");
  select.append(make("option", { value: "" }, "no GPU"));
  known.forEach((card, index) => select.append(make("option", { value: index }, `${card.name}, ${formatBytes(card.bytes, settings.units)}`)));
  select.value = chosen === undefined ? "" : String(known.indexOf(chosen));
  const apply = () => {
    source.capacity = select.value === "" ? null : known[Number(select.value)];
    const below = known.filter(({ bytes }) => bytes < source.most).slice(-2);
    source.limits = [...new Set([...(source.capacity ? [source.capacity] : []), ...below])];
  };
  apply();
  const chart = new Chart(root, source);
  select.addEventListener("change", () => { apply(); chart.redraw(); });
  const legend = byId("legend");
  for (const index of [...source.order].reverse()) {
    if (!source.members[index].some((i) => columns.size[i])) continue;
    const name = source.categories[index];
    const button = make("button", { type: "button", class: "key", "aria-pressed": "true", "data-category": name },
      make("i", { class: `c-${name}` }), categoryName(name));
    button.addEventListener("click", () => {
      if (!source.hidden.delete(index)) source.hidden.add(index);
      button.setAttribute("aria-pressed", String(!source.hidden.has(index)));
      source.sum();
      chart.redraw();
    });
    legend.append(button);
  }
  return chart;
}
