// Columns of integers out of a page's blocks: the counterpart of pack.py.

/** The bytes behind a base64 block of raw DEFLATE; null where the page has none. */
async function inflateBlock(id) {
  const element = byId(id);
  if (element === null) return null;
  const packed = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Text of a block. */
async function textBlock(id) {
  const bytes = await inflateBlock(id);
  return bytes === null ? null : new TextDecoder().decode(bytes);
}

/** { strings, columns by name as Float64Array or Int32Array } of a block. */
async function columnsBlock(id) {
  const bytes = await inflateBlock(id);
  if (bytes === null) return null;
  const end = bytes.indexOf(10);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  const columns = {};
  let at = end + 1;
  for (const [name, kind, count, length] of header.columns) {
    columns[name] = readColumn(bytes, at, count, kind === "delta");
    at += length;
  }
  return { strings: header.strings, ...columns };
}

/** `count` varints from `at` on. Multiplication, not shifts: sizes may exceed 32 bits. */
function readColumn(bytes, at, count, delta) {
  const values = new Float64Array(count);
  let last = 0;
  for (let i = 0; i < count; i++) {
    let value = 0;
    let factor = 1;
    let byte;
    do {
      byte = bytes[at++];
      value += (byte & 0x7f) * factor;
      factor *= 128;
    } while (byte > 0x7f);
    if (delta) {
      last += value % 2 === 0 ? value / 2 : -(value + 1) / 2;
      value = last;
    }
    values[i] = value;
  }
  return values;
}
