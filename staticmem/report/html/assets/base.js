// Shared by every page: data blocks, bytes as text, theme, elements. Nothing here makes HTML of strings: names come from
// models, and reach the page as text nodes only.

document.documentElement.classList.add("script");

const BINARY = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const DECIMAL = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];

/** Bytes as the report writes them, with three digits or so many after the point; `units` is "binary", "decimal" or "bytes". */
function formatBytes(n, units, digits) {
  if (units === "bytes") return `${n.toLocaleString("en-US")} B`;
  const sign = n < 0 ? "-" : "";
  const size = Math.abs(n);
  for (const [factor, name] of units === "decimal" ? DECIMAL : BINARY) {
    if (size < 0.9995 * factor) continue;
    const value = size / factor;
    const places = digits ?? (value < 9.995) + (value < 99.95);
    const rounded = Math.floor(value * 10 ** places + 0.5) / 10 ** places;
    const written = { minimumFractionDigits: places, maximumFractionDigits: places };
    return `${sign}${rounded.toLocaleString("en-US", written)} ${name}`;
  }
  return `${sign}${size} B`;
}

const byId = (id) => document.getElementById(id);

/** A JSON block of the page; null where it has none. */
function jsonBlock(id) {
  const element = byId(id);
  return element === null ? null : JSON.parse(element.textContent);
}

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The value of a colour variable under the present theme. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const themeListeners = [];
const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  const root = document.documentElement;
  if (theme === "system") root.removeAttribute("data-theme");
  else root.dataset.theme = theme;
  const button = byId("theme");
  if (button !== null) {
    button.textContent = { system: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme === "system" ? "as the system" : theme}`);
  }
  for (const listener of themeListeners) listener();
}

function initTheme() {
  const button = byId("theme");
  let at = 0;
  if (button !== null) {
    button.addEventListener("click", () => {
      at = (at + 1) % THEMES.length;
      setTheme(THEMES[at]);
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => themeListeners.forEach((f) => f()));
  setTheme("system");
}

/** Hands text to the user as a file. */
function saveAs(text, file, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: url, download: file });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
