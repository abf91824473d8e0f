// Puts the page together. `window.staticmem` is for scripts and tests; nothing in the page needs it.

async function main() {
  initTheme();
  const settings = jsonBlock("sm-settings");
  initDownload(settings);
  initFilter();
  initCopy();
  if (typeof DecompressionStream === "undefined") {
    byId("main").prepend(make("p", { class: "tight" }, "The charts need a browser of 2023 or newer (DecompressionStream)."));
    return;
  }
  const timeline = initTimeline(await columnsBlock("sm-timeline"), settings);
  const addresses = initAddresses(await columnsBlock("sm-addresses"), settings, timeline?.source ?? null);
  const icicle = initIcicle(await columnsBlock("sm-modules"), settings, "icicle", "model");
  const owners = initIcicle(await columnsBlock("sm-owners"), settings, "owners-icicle", "process");
  const whatIf = initWhatIf(settings);
  window.staticmem = Object.freeze({
    settings, timeline, addresses, icicle, owners, whatIf, setTheme,
    report: async () => JSON.parse(await textBlock("sm-report")),
    reportText: () => textBlock("sm-report"),
    ready: performance.now(), // milliseconds since the page began to load
  });
  document.documentElement.dataset.ready = "true";
}

function initDownload(settings) {
  byId("download")?.addEventListener("click", async () => saveAs(await textBlock("sm-report"), settings.file, "application/json"));
}

/** The table of tensors: rows that contain every word, and how many there are. */
function initFilter() {
  const [input, table] = [byId("tensor-filter"), byId("tensors")];
  const said = byId("tensor-found");
  if (input === null || table === null || said === null) return;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      found += row.hidden ? 0 : 1;
    }
    const all = table.tBodies[0].rows.length;
    said.textContent = words.length === 0 ? "" : found === 0 ? `No tensor of these ${all} matches.` : `${found} of ${all} match.`;
  });
}

function initCopy() {
  byId("copy")?.addEventListener("click", async () => {
    const command = byId("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      byId("copy").textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command); // without the right to the clipboard: ready for Ctrl-C
    }
  });
}

main();
