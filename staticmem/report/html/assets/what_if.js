// The sliders: the peak of live bytes out of its closed form, for the settings that were traced.

const ROUND = 512;
const roundUp = (bytes) => Math.ceil(bytes / ROUND) * ROUND;

class WhatIf {
  constructor(data, settings) {
    Object.assign(this, data);
    this.page = settings;
    this.base = this.settings[0];
  }

  find(optimizer, precision, resolution) {
    return this.settings.find((s) => s.optimizer === optimizer && s.precision === precision && s.resolution === resolution);
  }

  /** { bytes, moment } at the peak of a setting. */
  peak(setting, batch) {
    let best = { bytes: -1, moment: null };
    for (const moment of setting.moments) {
      let bytes = 0;
      for (let i = 0; i < moment.terms.length; i += 2) {
        const [, base, slope] = this.terms[moment.terms[i]];
        bytes += moment.terms[i + 1] * roundUp(base + slope * batch);
      }
      if (bytes > best.bytes) best = { bytes, moment };
    }
    return best;
  }

  parts(moment, batch) {
    const parts = {};
    for (let i = 0; i < moment.terms.length; i += 2) {
      const [category, base, slope] = this.terms[moment.terms[i]];
      parts[category] = (parts[category] ?? 0) + moment.terms[i + 1] * roundUp(base + slope * batch);
    }
    return parts;
  }
}

class WhatIfForm {
  constructor(model) {
    this.model = model;
    this.fields = Object.fromEntries(["optimizer", "precision", "resolution"].map((key) => [key, byId(key)]));
    for (const [key, select] of Object.entries(this.fields)) {
      for (const value of new Set(model.settings.map((s) => s[key]))) select.append(make("option", { value }, value));
      select.value = model.base[key];
      if (select.options.length < 2) select.disabled = true;
      select.addEventListener("change", () => this.update());
    }
    if (!model.base.resolution) byId("resolution-label").hidden = true;
    byId("resolution-fixed").hidden = this.fields.resolution.options.length > 1;
    this.range = byId("batch-range");
    this.number = byId("batch");
    this.number.min = model.base.low;
    this.number.max = model.base.high;
    this.batch = model.batch;
    this.range.addEventListener("input", () => this.setBatch(this.fromRange(Number(this.range.value))));
    this.number.addEventListener("input", () => this.number.value && this.setBatch(Number(this.number.value)));
    this.number.form.addEventListener("submit", (event) => event.preventDefault());
    themeListeners.push(() => this.update());
    new ResizeObserver(() => this.update()).observe(byId("what-if-chart"));
    this.update();
  }

  // the range is logarithmic: the step from 8 to 16 matters as the one from 128 to 256
  fromRange(at) {
    const { low, high } = this.model.base;
    return Math.round(low * (high / low) ** (at / 1000));
  }

  toRange(batch) {
    const { low, high } = this.model.base;
    return high === low ? 0 : (1000 * Math.log(batch / low)) / Math.log(high / low);
  }

  setBatch(batch) {
    const { low, high } = this.model.base;
    this.batch = Math.min(Math.max(Math.round(batch), low), high);
    this.update();
  }

  update() {
    const { model, batch } = this;
    const { units } = model.page;
    const [optimizer, precision, resolution] = ["optimizer", "precision", "resolution"].map((key) => this.fields[key].value);
    const setting = model.find(optimizer, precision, resolution);
    if (document.activeElement !== this.number) this.number.value = batch;
    if (document.activeElement !== this.range) this.range.value = this.toRange(batch);
    this.range.setAttribute("aria-valuetext", String(batch));
    byId("what-if-command").textContent = [model.command, "--batch", batch, ...(setting?.flags ?? [])].join(" ");
    const inRange = setting?.moments !== undefined && batch >= setting.low && batch <= setting.high;
    this.none(inRange ? "" : setting?.reason || (setting ? `traced for batches ${setting.low} to ${setting.high} only` : "this combination was not traced"));
    if (!inRange) return;
    const { bytes, moment } = model.peak(setting, batch);
    const out = byId("what-if-peak");
    out.textContent = formatBytes(bytes, units);
    out.dataset.bytes = bytes;
    const asked = model.page.peak_bytes;
    const change = bytes - asked;
    const percent = asked ? ` (${change > 0 ? "+" : ""}${((100 * change) / asked).toFixed(1)} %)` : "";
    byId("what-if-delta").textContent = change === 0 ? "the report's own setting, or as much"
      : `${change > 0 ? "+" : "−"}${formatBytes(Math.abs(change), units)}${percent} against the report; ${bytes.toLocaleString("en-US")} bytes`;
    byId("what-if-when").textContent = `at the peak in ${moment.phase === "setup" ? "what exists before the step" : moment.phase}`;
    this.bar(model.parts(moment, batch), bytes);
    this.chart(setting, batch, bytes);
  }

  /** Says why there is no figure, and takes the old one away. */
  none(reason) {
    byId("what-if-reason").textContent = reason ? `No figure: ${reason}. The command below gives it.` : "";
    if (!reason) return;
    for (const id of ["what-if-peak", "what-if-delta", "what-if-when"]) byId(id).textContent = "";
    delete byId("what-if-peak").dataset.bytes;
    byId("what-if-bar").replaceChildren();
    byId("what-if-chart").replaceChildren();
  }

  bar(parts, total) {
    const bar = byId("what-if-bar");
    bar.replaceChildren();
    const said = [];
    let at = 0;
    for (const name of this.model.page.order) {
      if (!parts[name]) continue;
      const width = (1000 * parts[name]) / total;
      said.push(`${categoryName(name)} ${formatBytes(parts[name], this.model.page.units)}`);
      const rect = makeSvg("rect", { x: at, y: 4, width, height: 16, class: `c-${name}` }, makeSvg("title", {}, said.at(-1)));
      bar.append(rect);
      at += width;
    }
    bar.setAttribute("aria-label", said.join(", "));
  }

  chart(setting, batch, bytes) {
    const svg = byId("what-if-chart");
    const [width, height, left, bottom, top] = [svg.clientWidth || 900, 230, 76, 26, 14];
    const { units, cards } = this.model.page;
    const most = Math.max(setting.low + 1, Math.min(setting.high, Math.max(batch * 2, this.model.batch * 2, 8)));
    const ceiling = this.model.peak(setting, most).bytes * 1.08;
    const x = (value) => left + ((value - setting.low) / (most - setting.low)) * (width - left - 16);
    const y = (value) => height - bottom - (value / ceiling) * (height - bottom - top);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const line = (cls, ...at) => makeSvg("path", { class: cls, d: `M${at[0]} ${at[1]}L${at[2]} ${at[3]}` });
    const step = niceStep(ceiling, 4, units);
    for (let value = 0; value <= ceiling; value += step) {
      svg.append(line("grid", left, y(value), width, y(value)));
      svg.append(makeSvg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, axisLabel(value, step, units)));
    }
    const stride = Math.max(niceStep(most - setting.low, 8, "bytes"), 1);
    for (let value = Math.ceil(setting.low / stride) * stride; value <= most; value += stride) {
      svg.append(makeSvg("text", { x: x(value), y: height - 8, "text-anchor": "middle" }, value.toLocaleString("en-US")));
    }
    svg.append(makeSvg("text", { x: left - 8, y: height - 8, "text-anchor": "end" }, "batch"));
    let last = Infinity;
    for (const card of capacities(cards).filter((card) => card.bytes < ceiling).reverse()) {
      if (last - card.bytes < ceiling / 9) continue; // names would lie on each other
      last = card.bytes;
      svg.append(line("limit", left, y(card.bytes), width, y(card.bytes)));
      svg.append(makeSvg("text", { x: left + 8, y: y(card.bytes) - 5, class: "limit-name" }, `${card.name}: ${formatBytes(card.bytes, units)} usable`));
    }
    const points = [];
    for (let i = 0; i <= 120; i++) {
      const value = Math.round(setting.low + ((most - setting.low) * i) / 120);
      points.push(`${x(value).toFixed(1)} ${y(this.model.peak(setting, value).bytes).toFixed(1)}`);
    }
    svg.append(makeSvg("path", { class: "curve", d: `M${points.join("L")}` }));
    svg.append(makeSvg("circle", { class: "dot", cx: x(Math.min(batch, most)), cy: y(bytes), r: 6 }));
  }
}

function initWhatIf(settings) {
  const data = jsonBlock("sm-what-if");
  return data === null || byId("what-if-form") === null ? null : new WhatIfForm(new WhatIf(data, settings));
}
