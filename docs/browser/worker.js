// Python with the package, beside the page: the page stays alive while it computes.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const PACKAGES = "/packages";
const FILES = "/files";
const RUN = `
import contextlib, io, sys
sys.path.insert(0, "${PACKAGES}")
from staticmem.cli.main import main

def run(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as ending:
            code = ending.code or 0
    return code, out.getvalue(), err.getvalue()
`;

async function bytes(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return new Uint8Array(await answer.arrayBuffer());
}

async function start() {
  const build = JSON.parse(new TextDecoder().decode(await bytes("./build.json")));
  const [python, wheel] = await Promise.all([loadPyodide({ indexURL: "./pyodide/" }), bytes(build.wheel)]);
  python.unpackArchive(wheel, "wheel", { extractDir: PACKAGES });
  python.FS.mkdirTree(FILES);
  python.FS.chdir(FILES);
  python.runPython(RUN);
  return python;
}

const starting = start();

function answer(python, request) {
  if (request.file) {
    python.FS.writeFile(request.file, new Uint8Array(request.data));
    return {};
  }
  if (request.read) return { data: python.FS.readFile(request.read) };
  const argv = python.toPy(request.argv);
  const result = python.globals.get("run")(argv);
  const [code, out, err] = result.toJs();
  result.destroy();
  argv.destroy();
  return { code, out, err };
}

self.onmessage = async ({ data: request }) => {
  try {
    const python = await starting;
    self.postMessage({ id: request.id, ...answer(python, request) });
  } catch (error) {
    self.postMessage({ id: request.id, failure: String(error) });
  }
};
