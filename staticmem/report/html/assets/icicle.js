// Memory at the peak by module, as an icicle: the model at the left, its modules to the right of it, theirs further on.

const ICICLE_HEIGHT = 420;
const ICICLE_LEAST = 3; // pixels: what is thinner is not drawn

/** The tree of modules, below their owners where the block has these: { name, path, own, bytes, parts, children }. */
function moduleTree(block, title) {
  const root = { name: title, path: "", own: 0, bytes: 0, parts: {}, children: new Map() };
  block.strings.modules.forEach((path, row) => {
    let node = root;
    const owner = block.owner ? [block.strings.owners[block.owner[row]]] : [];
    const names = [...owner, ...(path === "" ? [] : path.split("."))];
    const chain = [root];
    names.forEach((name, depth) => {
      if (!node.children.has(name)) {
        const modules = names.slice(owner.length, depth + 1).join(".");
        const below = [...owner, modules].filter((part) => part !== "").join(": ");
        node.children.set(name, { name, path: below, own: 0, bytes: 0, parts: {}, children: new Map() });
      }
      node = node.children.get(name);
      chain.push(node);
    });
    for (const category of block.strings.categories) {
      const bytes = block[category][row] * 512;
      if (!bytes) continue;
      node.own += bytes;
      for (const link of chain) {
        link.bytes += bytes;
        link.parts[category] = (link.parts[category] ?? 0) + bytes;
      }
    }
  });
  return root;
}

class Icicle {
  constructor(block, units, id, title) {
    this.units = units;
    this.svg = byId(id);
    this.crumbs = byId(`${id}-crumbs`);
    this.now = byId(`${id}-now`);
    this.root = moduleTree(block, title);
    this.trail = [this.root];
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.svg);
    themeListeners.push(() => this.draw());
    this.draw();
  }

  get top() {
    return this.trail.at(-1);
  }

  resize() {
    if (Math.abs(this.svg.clientWidth - this.width) > 1) this.draw();
  }

  go(trail) {
    this.trail = trail;
    this.draw();
    this.svg.querySelector("g")?.focus();
  }

  /** The children that are drawn, the largest first; those that are too thin for it are one. */
  shown(node, scale) {
    const sorted = [...node.children.values()].sort((a, b) => b.bytes - a.bytes);
    const large = sorted.filter((child) => child.bytes * scale >= ICICLE_LEAST);
    const rest = { name: "", path: node.path, own: 0, bytes: 0, parts: {}, children: new Map(), count: sorted.length - large.length };
    for (const child of sorted.slice(large.length)) {
      rest.bytes += child.bytes;
      for (const [category, bytes] of Object.entries(child.parts)) rest.parts[category] = (rest.parts[category] ?? 0) + bytes;
    }
    if (rest.count === 0 || rest.bytes * scale < ICICLE_LEAST) return large;
    rest.name = `${rest.count.toLocaleString("en-US")} smaller ones`;
    return [...large, rest];
  }

  depthOf(node, scale) {
    return 1 + this.shown(node, scale).reduce((most, child) => Math.max(most, this.depthOf(child, scale)), 0);
  }

  draw() {
    this.width = this.svg.clientWidth || 1000;
    const scale = ICICLE_HEIGHT / Math.max(this.top.bytes, 1);
    const depth = this.depthOf(this.top, scale);
    const column = this.width / Math.max(depth, 1);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${ICICLE_HEIGHT}`);
    this.svg.setAttribute("height", ICICLE_HEIGHT);
    this.svg.replaceChildren();
    this.place(this.top, this.trail, 0, 0, column, scale, 1);
    this.crumbs.replaceChildren();
    this.trail.forEach((node, index) => {
      const button = make("button", { type: "button" }, make("bdi", {}, node.name));
      if (index === this.trail.length - 1) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.go(this.trail.slice(0, index + 1)));
      this.crumbs.append(...(index ? ["›"] : []), button);
    });
    this.say(this.top);
  }

  place(node, trail, level, y, column, scale, depth) {
    const height = node.bytes * scale;
    if (height < ICICLE_LEAST) return;
    const x = level * column;
    const parts = Object.entries(node.parts).sort((a, b) => b[1] - a[1]);
    const label = `${node.name}: ${formatBytes(node.bytes, this.units)}`;
    const group = makeSvg("g", {
      tabindex: level === 0 ? 0 : -1, role: "treeitem", "aria-label": this.words(node), "aria-level": depth, "data-path": node.path,
    });
    let right = x;
    for (const [category, bytes] of parts) {
      const width = (column * bytes) / node.bytes;
      group.append(makeSvg("rect", { x: right, y, width, height, class: `c-${category}` }));
      right += width;
    }
    group.append(makeSvg("rect", { x, y, width: column, height, class: "frame" }));
    if (height >= 15) {
      const room = Math.floor((column - 14) / 7.4);
      const said = label.length > room ? `${label.slice(0, Math.max(room - 1, 0))}…` : label;
      if (room > 4) {
        group.append(makeSvg("text", { x: x + 7, y: y + Math.min(height / 2 + 4, 17), class: parts[0]?.[0] === "parameter" ? "on-dark" : "" }, said));
      }
    }
    if (node.count === undefined) group.addEventListener("click", () => this.go(trail));
    group.addEventListener("pointerenter", () => this.say(node));
    group.addEventListener("focus", () => this.say(node));
    this.svg.append(group);
    let at = y;
    for (const child of this.shown(node, scale)) {
      this.place(child, [...trail, child], level + 1, at, column, scale, depth + 1);
      at += child.bytes * scale;
    }
  }

  words(node) {
    const share = this.root.bytes ? ((100 * node.bytes) / this.root.bytes).toFixed(1) : "0";
    const parts = Object.entries(node.parts).sort((a, b) => b[1] - a[1])
      .map(([name, bytes]) => `${categoryName(name)} ${formatBytes(bytes, this.units)}`).join(", ");
    const own = node.children.size && node.own ? `, ${formatBytes(node.own, this.units)} its own` : "";
    const who = node.count === undefined ? node.path || this.root.name : `${node.name} in ${node.path || this.root.name}`;
    return `${who}: ${formatBytes(node.bytes, this.units)}, ${share} % of the peak${own} (${parts})`;
  }

  say(node) {
    this.now.textContent = this.words(node);
  }

  key(event) {
    const groups = [...this.svg.querySelectorAll("g")];
    const at = groups.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: groups.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      groups[Math.min(Math.max(to, 0), groups.length - 1)]?.focus();
    } else if (event.key === "Enter" || event.key === " " || event.key === "ArrowRight") {
      event.preventDefault();
      groups[at]?.dispatchEvent(new MouseEvent("click"));
    } else if (event.key === "Backspace" || event.key === "ArrowLeft" || event.key === "Escape") {
      event.preventDefault();
      if (this.trail.length > 1) this.go(this.trail.slice(0, -1));
    }
  }
}

function initIcicle(block, settings, id, title) {
  return block === null || byId(id) === null ? null : new Icicle(block, settings.units, id, title);
}
