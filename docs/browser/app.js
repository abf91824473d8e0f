// The form, and the answers of the worker. Text of files and of Python is only ever set as text.
const $ = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map();
let model = null; // the name of the user's file; null: a known model
let last = []; // the flags of the answer that is shown
let sent = new Set(); // files that the worker has

worker.onmessage = ({ data }) => {
  const { resolve, reject } = waiting.get(data.id);
  waiting.delete(data.id);
  if (data.failure) reject(new Error(data.failure));
  else resolve(data);
};
worker.onerror = (event) => fail({ what: "Python could not be loaded", why: event.message, hint: "Reload the page; the folder has to be served whole." });

function ask(request) {
  return new Promise((resolve, reject) => {
    const id = crypto.randomUUID();
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, ...request });
  });
}

const run = (argv) => ask({ argv });
const say = (text) => { $("status").textContent = text; };

function sized(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let number = bytes;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit ? number.toPrecision(number >= 1000 ? 4 : 3) : number} ${units[unit]}`;
}

function option(select, value, text, group) {
  let parent = select;
  if (group) {
    parent = [...select.querySelectorAll("optgroup")].find((g) => g.label === group);
    if (!parent) {
      parent = document.createElement("optgroup");
      parent.label = group;
      select.append(parent);
    }
  }
  parent.append(new Option(text, value));
}

function fail({ what, why, hint }) {
  $("answer").hidden = true;
  $("error").hidden = false;
  $("what").textContent = what;
  $("why").textContent = why;
  $("hint").textContent = hint;
}

function words(text) {
  return (text.match(/"[^"]*"|'[^']*'|\S+/g) || []).map((word) => word.replace(/^(["'])(.*)\1$/, "$2"));
}

function flags() {
  const chosen = ["--batch", $("batch").value];
  if ($("optimizer").value) chosen.push("--optimizer", $("optimizer").value);
  else chosen.push("--mode", "infer");
  return [...chosen, ...words($("precision").value), "--gpu", $("gpu").value, ...words($("flags").value)];
}

async function send(name, data) {
  if (sent.has(name)) return;
  await ask({ file: name, data });
  sent.add(name);
}

async function chosenModel() {
  if (model) return model;
  const name = `${$("known").value}.pt2`;
  if (!sent.has(name)) {
    const answer = await fetch(`models/${name}`);
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
    await send(name, await answer.arrayBuffer());
  }
  return name;
}

function bar(parent, parts) {
  const box = document.createElement("div");
  box.className = "bar";
  for (const [kind, share, left] of parts) {
    const part = document.createElement("i");
    part.className = kind;
    if (kind === "limit") part.style.left = `${100 * share}%`;
    else {
      part.style.left = `${100 * (left || 0)}%`;
      part.style.width = `${100 * Math.max(share - (left || 0), 0)}%`;
    }
    box.append(part);
  }
  parent.append(box);
}

function showMeters(report) {
  const peak = report.peak;
  const card = report.gpu;
  const values = { live: peak.live_bytes, allocated: peak.allocated_bytes, reserved: peak.reserved_bytes, device: peak.device_bytes };
  const limit = card ? card.usable_bytes : 0; // a report without --gpu has no card
  const all = Math.max(limit, ...Object.keys(values).map((name) => Math.max(values[name] ?? 0, peak.bands[name]?.high ?? 0)));
  $("meters").replaceChildren();
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined) continue;
    const band = peak.bands[name] || { low: value, high: value };
    const row = document.createElement("div");
    row.className = "meter";
    row.append(Object.assign(document.createElement("b"), { textContent: name }));
    bar(row, [["value", value / all], ["band", band.high / all, band.low / all], ...(limit ? [["limit", limit / all]] : [])]);
    const figure = document.createElement("span");
    figure.append(Object.assign(document.createElement("b"), { textContent: sized(value) }));
    if (band.low !== band.high) {
      figure.append(Object.assign(document.createElement("small"), { textContent: `${sized(band.low)} to ${sized(band.high)}` }));
    }
    row.append(figure);
    row.title = `${value} bytes`;
    row.setAttribute("aria-label", `${name}: ${sized(value)}${limit ? ` of ${sized(limit)}` : ""}`);
    $("meters").append(row);
  }
}

function showCategories(report) {
  const rows = Object.entries(report.peak.by_category).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const body = $("categories").tBodies[0];
  body.replaceChildren();
  for (const [name, bytes] of rows) {
    const share = bytes / report.peak.live_bytes;
    const row = body.insertRow();
    row.insertCell().textContent = name.replace("_", " ");
    for (const text of [sized(bytes), `${(100 * share).toFixed(1)} %`]) {
      const cell = row.insertCell();
      cell.className = "num";
      cell.textContent = text;
    }
    bar(row.insertCell(), [["value", share]]);
  }
}

function show(report, sentence, name, argv) {
  $("error").hidden = true;
  $("answer").hidden = false;
  const fit = report.gpu ? report.gpu.fit : "";
  $("verdict").textContent = fit ? `${fit[0].toUpperCase()}${fit.slice(1)}: ${report.gpu.name}` : "No GPU was asked for";
  $("verdict").className = fit.replaceAll(" ", "-");
  $("sentence").textContent = sentence;
  showMeters(report);
  showCategories(report);
  $("assumed").replaceChildren(...[...report.warnings, ...report.assumptions].map((note) => Object.assign(document.createElement("li"), { textContent: `${note.text} [${note.code}]` })));
  $("command").textContent = ["staticmem", ...argv].join(" ");
  const link = $("known-file").querySelector("a");
  link.href = `models/${name}`;
  link.textContent = name;
  $("known-file").hidden = model !== null;
}

async function analyze() {
  const begin = performance.now();
  const name = await chosenModel();
  const argv = name.endsWith(".json") ? ["report", name] : ["analyze", name, ...flags()];
  const answer = await run([...argv, "-f", "json"]);
  if (answer.code !== 0) {
    fail(JSON.parse(answer.out));
    say("");
    return;
  }
  const first = await run([...argv, "-q"]);
  last = argv;
  show(JSON.parse(answer.out), first.out.trim(), name, argv);
  say(`${((performance.now() - begin) / 1000).toFixed(1)} s`);
}

async function busy(what, task) {
  $("go").disabled = true;
  say(what);
  try {
    await task();
  } catch (error) {
    fail({ what: "It could not be done", why: error.message, hint: "Please report it, with the file if you can share it." });
    say("");
  }
  $("go").disabled = false;
}

function download(name, data, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function saved(suffix, type) {
  const answer = await run([...last, "-o", `report${suffix}`, "--force"]);
  if (answer.code !== 0) throw new Error(answer.err);
  download(`report${suffix}`, (await ask({ read: `report${suffix}` })).data, type);
  say("");
}

async function take(file) {
  await busy("The file is read …", async () => {
    sent.delete(file.name);
    await send(file.name, await file.arrayBuffer());
    model = file.name;
    $("file-name").textContent = file.name;
    $("step").disabled = file.name.endsWith(".json");
    say("");
  });
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  busy("It is worked out …", analyze);
});
$("known").addEventListener("change", () => {
  model = null;
  $("file").value = "";
  $("file-name").textContent = "";
  $("step").disabled = false;
});
$("file").addEventListener("change", () => { if ($("file").files[0]) take($("file").files[0]); });
for (const kind of ["dragover", "dragenter"]) $("drop").addEventListener(kind, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
for (const kind of ["dragleave", "drop"]) $("drop").addEventListener(kind, () => $("drop").classList.remove("over"));
$("drop").addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
});
$("page").addEventListener("click", () => busy("The page is made: some seconds …", () => saved(".html", "text/html")));
$("json").addEventListener("click", () => busy("", () => saved(".json", "application/json")));

const build = await (await fetch("build.json")).json();
for (const row of build.models) option($("known"), row.name, row.name, row.group);
for (const row of build.gpus) option($("gpu"), row.slug, `${row.name}, ${sized(row.usable_bytes)}`, row.class);
option($("optimizer"), "", "inference");
for (const name of build.optimizers) option($("optimizer"), name, `training, ${name}`);
$("known").value = "resnet50";
$("optimizer").value = "adam";
$("gpu").value = "rtx-4090";
$("version").textContent = `staticmem ${build.version}, ${build.models.length} known models, ${build.gpus.length} GPUs.`;
run(["--version"]).then(() => {
  $("go").disabled = false;
  say("");
  document.documentElement.dataset.ready = "true";
}, (error) => fail({ what: "Python could not be loaded", why: error.message, hint: "Reload the page; the folder has to be served whole." }));
