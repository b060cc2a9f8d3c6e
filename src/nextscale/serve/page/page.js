// The page of `nextscale serve`. It talks to the public API of its own server and to nothing else; what the API
// sends is only ever set as text, never as HTML.

// An image has the previews of all scales, a few megabytes in all; index.html names both numbers.
const HISTORY_LIMIT = 30;
const HISTORY_BYTES = 200e6;
const MAX_SEED = Number.MAX_SAFE_INTEGER; // the API takes more, but JavaScript's numbers are exact up to here
const API_KEY = "nextscale-api-key";
const THEME = "nextscale-theme";
const EXAMPLES = {
  words: ["two foxes above a blue heart", "a penguin in the snow", "a flat rocket at night", "three yellow stars on a striped background",
    "three parrots on a beach"],
  labels: ["207", "88", "985", "933", "562"], // golden retriever, macaw, daisy, cheeseburger, fountain
  text: ["a lighthouse on a cliff at dawn, oil painting", "a red fox sleeping in autumn leaves", "a bowl of ramen, studio light"],
};

const state = {
  info: null, // what the API says of the chosen model
  methods: null, // and of the methods for it
  words: [], // [{word, kind}], for completion
  running: null, // {image, side, controller} while something is made
  shown: null, // the image on the stage
  scale: null, // the scale to look at; null: the latest
  history: [],
};

const $ = (id) => document.getElementById(id);
const number = (value) => new Intl.NumberFormat("en").format(value);
const seconds = (value) => `${value < 9.95 ? value.toFixed(value < 0.995 ? 2 : 1) : Math.round(value)} s`;
const percent = (share) => `${share > 0 && share < 0.005 ? "<1" : Math.round(100 * share)} %`;
const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

/** A storage of the browser; where it may keep nothing for this page, one that ends with the page. */
function storageOf(name) {
  try {
    return window[name];
  } catch {
    const kept = new Map();
    return { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value) };
  }
}

const [local, session] = ["localStorage", "sessionStorage"].map(storageOf);

const on = (id, type, listener) => $(id).addEventListener(type, listener);

/** The API's messages begin in lower case; names such as "nova:" or "t_est" stay as they are. */
const sentence = (text) => text.replace(/^[a-z](?=[a-z]* )/, (c) => c.toUpperCase()) + (/[.!?]$|^$/.test(text) ? "" : ".");

/** Make an element: properties, then children (text or elements). */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- messages ----
/** Say something to screen readers; for what is visible anyway. */
const announce = (text) => ($("live").textContent = text);

/** Show a line that may change often, so it is not announced. */
function note(text) {
  $("note").textContent = text;
  $("note").hidden = !text;
}

/** Show what went wrong as a sentence; the place is a live region. */
function showError(text) {
  $("error").textContent = sentence(text);
  $("error").hidden = !text;
}

/** Show why something failed, unless it was stopped on purpose. */
function report(error, what = "") {
  if (error.name !== "AbortError") showError(what + error.message);
}

/** Make a listener that says what failed. */
const reporting = (what, action) => (...given) => action(...given).catch((error) => report(error, what));

/** Open a dialog and wait for the value of the button that closed it ("" where it was dismissed). */
function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

// ---- API ----
class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = 1 } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

async function errorOf(response) {
  const error = (await response.json().catch(() => ({}))).error ?? {};
  const milliseconds = Number(response.headers.get("retry-after-ms")) || 1000 * Number(response.headers.get("retry-after"));
  return new ApiError(error.message || `The server answered ${response.status} ${response.statusText}.`, {
    status: response.status,
    code: error.code,
    retryAfter: Math.min(Math.max(milliseconds / 1000 || 1, 0.1), 600),
  });
}

async function askKey(message) {
  $("key-text").textContent = sentence(message);
  $("key").value = "";
  const answer = await ask($("key-dialog"));
  if (answer) session.setItem(API_KEY, $("key").value);
  return Boolean(answer);
}

async function send(path, options) {
  const key = session.getItem(API_KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
}

/** Fetch; ask for the key where one is missing, wait where the queue is full or the model is loading. */
async function request(path, options = {}) {
  for (;;) {
    const response = await send(path, options);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status === 401 && (await askKey(error.message))) continue;
    else if (error.status === 429) await waitForPlace(error.retryAfter, options.signal);
    else if (error.status === 503 && error.code === "loading") await waitUntilReady(options.signal);
    else throw error;
  }
}

function sleep(wait, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted(); // an abort that is over sends no event
    const stop = () => (clearTimeout(timer), reject(signal.reason));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", stop), resolve()), 1000 * wait);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

async function waitForPlace(wait, signal) {
  const before = $("note").textContent;
  const text = (left) => `The queue is full; trying again in ${Math.ceil(left)} s.`;
  announce(text(wait)); // once; the line below counts down in silence
  for (let left = wait; left > 0; left -= 1) {
    note(text(left));
    await sleep(Math.min(left, 1), signal);
  }
  note(before);
}

async function waitUntilReady(signal) {
  const text = "The model is loading …";
  for (;;) {
    const response = await send("/health", { signal });
    if (response.ok) {
      if ($("note").textContent === text) note("");
      return;
    }
    const { status } = await response.json().catch(() => ({}));
    if (status !== "loading") throw new ApiError(`The server cannot make images now: its state is "${status}".`, { status: 503 });
    if ($("note").textContent !== text) announce("The model is loading.");
    note(text);
    await sleep(0.7, signal);
  }
}

const interrupted = () => new ApiError("The connection ended before the image was finished.");

/** Yield the data of server-sent events. EventSource would do this, but it cannot POST. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : interrupted();
    });
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5));
      if (data.length) yield JSON.parse(data.join("\n"));
    }
  }
}

// ---- settings and forms ----
/** What the select of methods means to the API. */
function methodFields({ choice, custom }) {
  if (choice === "custom") return { method: custom };
  if (choice.startsWith("quality:")) return { quality: choice.slice("quality:".length) };
  return choice ? { method: choice } : {};
}

/** The request's own fields: the same for the page and for the code that it offers to copy. */
function requestBody(settings) {
  const { model, prompt, size, seed, guidance, negative } = settings;
  return {
    model,
    prompt,
    size,
    seed,
    ...methodFields(settings),
    ...(guidance !== "" && { guidance_scale: Number(guidance) }),
    ...(negative && { negative_prompt: negative }),
  };
}

/** The form's settings; throws a sentence about the first that cannot be sent. */
function readForm() {
  const value = (id) => $(id).value.trim();
  const settings = {
    model: $("model").value,
    prompt: value("prompt"),
    size: value("size"),
    choice: $("method").value,
    custom: $("method").value === "custom" ? value("custom") : "",
    seed: value("seed"),
    guidance: value("guidance").replace(",", "."),
    negative: $("negative-field").hidden ? "" : value("negative"),
    previews: $("previews").checked,
  };
  const refuse = (id, text) => {
    for (let part = $(id).closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    $(id).focus();
    throw new ApiError(text);
  };
  if (!settings.prompt) refuse("prompt", "Say first what should appear.");
  if (settings.choice === "custom" && !settings.custom) refuse("custom", "Name the method, for example nova:t_est=8.");
  if (settings.seed && !(/^\d+$/.test(settings.seed) && Number(settings.seed) <= MAX_SEED))
    refuse("seed", `The seed is a whole number from 0 to ${MAX_SEED}.`);
  if (settings.guidance && !Number.isFinite(Number(settings.guidance))) refuse("guidance", "The guidance is a number, for example 4.");
  return settings;
}

const seeding = () => document.querySelector("input[name=seeding]:checked").value;
const setSeeding = (value) => (document.querySelector(`input[name=seeding][value=${value}]`).checked = true);

function chooseSeed(typed) {
  if (seeding() === "random" || typed === "") return crypto.getRandomValues(new Uint32Array(1))[0];
  return seeding() === "next" ? Number(typed) + 1 : Number(typed);
}

/** Is this image made of the form's settings? */
function matches(image, settings) {
  const keys = ["model", "prompt", "size", "choice", "custom", "guidance", "negative", "previews"];
  return image?.made.final && keys.every((key) => image.settings[key] === settings[key]) && String(image.settings.seed) === settings.seed;
}

/** Choose an option, if it is still offered. */
function choose(select, value) {
  if ([...select.options].some((option) => option.value === value)) select.value = value;
}

/** Set the form so that Generate makes the same image again. */
async function fillForm(settings) {
  for (const id of ["prompt", "custom", "guidance", "negative", "seed"]) $(id).value = settings[id];
  setSeeding("keep");
  $("previews").checked = settings.previews;
  await connect();
  choose($("model"), settings.model);
  await loadModel(); // stops here if another model is chosen meanwhile
  choose($("size"), settings.size);
  choose($("method"), settings.choice);
  methodChanged();
}

// ---- making an image ----
// An image: {id, created, settings, made: side, plain: side or null}. A side is one run; its steps are the scales.
const newSide = () => ({ method: null, final: null, steps: [], tokens: 0, tokensPlain: 0, seconds: 0, warnings: [] });
const pngOf = (text) => new Blob([fromBase64(text)], { type: "image/png" });

function addPreview(side, event) {
  const { scale, scales, grid, computed } = event.nextscale;
  if (side.steps.length !== scales) side.steps = Array.from({ length: scales }, (_, i) => side.steps[i] ?? null);
  side.steps[scale - 1] = { grid, computed: fromBase64(computed), blob: pngOf(event.b64_json) };
  side.seconds = event.nextscale.seconds;
}

function finish(side, event) {
  const { method, tokens, tokens_plain, scales, warnings } = event.nextscale;
  for (const { scale, grid, tokens, computed } of scales ?? [])
    side.steps[scale - 1] = { ...side.steps[scale - 1], grid, tokens, computed: fromBase64(computed) };
  side.steps = Array.from(side.steps, (step) => step ?? null);
  Object.assign(side, { final: pngOf(event.b64_json), method, tokens, tokensPlain: tokens_plain });
  Object.assign(side, { seconds: event.nextscale.seconds, warnings: warnings ?? [] });
}

async function makeSide(settings, side, signal) {
  const body = { ...requestBody(settings), stream: true, ...(settings.previews && { previews: "all" }) };
  const headers = { "Content-Type": "application/json" };
  const response = await request("/v1/images/generations", { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const event of events(response)) {
    if (event.error) throw new ApiError(event.error.message, event.error);
    if (event.type === "image_generation.partial_image") addPreview(side, event);
    if (event.type === "image_generation.completed") finish(side, event);
    render();
  }
  if (!side.final) throw interrupted();
}

/** Make one side of an image and remember it. */
async function makeAndSave(image, name, settings) {
  const { controller } = state.running;
  state.running.side = image[name] = newSide();
  note(name === "plain" ? "Making the plain image …" : "Making the image …");
  render();
  await makeSide(settings, image[name], controller.signal);
  await saveImage(image);
}

async function generate(withPlain) {
  if (state.running) return;
  showError("");
  try {
    await connect(); // the first try may have failed, or the key was not at hand
    await loadModel();
  } catch (error) {
    return report(error);
  }
  if (state.running) return; // pressed twice while loading
  const before = state.shown;
  const image = startImage(withPlain);
  if (!image) return;
  state.running = { image, side: null, controller: new AbortController() };
  showImage(image);
  $("canvas").scrollIntoView({ block: "nearest" }); // below the settings on a phone
  announce("Generating.");
  let outcome;
  try {
    if (!image.made.final) await makeAndSave(image, "made", image.settings);
    if (withPlain && image.made.method === "none") throw new ApiError("At this size that method computes everything: this is the plain image.");
    if (withPlain) await makeAndSave(image, "plain", { ...image.settings, choice: "none" });
    outcome = withPlain ? comparison(image).join(" ") : summary(image.made);
  } catch (error) {
    outcome = error.name === "AbortError" ? "Canceled." : "";
    if (!outcome) showError(error.message);
    if (!image.plain?.final) image.plain = null;
    if (state.shown === image && !image.made.final && !image.made.steps.length) showImage(before); // there is nothing to see
  } finally {
    const returnFocus = document.activeElement === $("cancel");
    state.running = null;
    note(outcome === "Canceled." ? outcome : "");
    announce(outcome);
    render();
    if (returnFocus) $("generate").focus();
  }
}

/** The image to make: a new one of the form's settings, or the one on the stage if only its comparison is missing. */
function startImage(withPlain) {
  try {
    const settings = readForm();
    const { method, quality } = methodFields(settings);
    const name = method ?? state.methods?.qualities[quality ?? "auto"];
    if (withPlain && name === "none") throw new ApiError("Plain against plain shows nothing: choose a method first.");
    if (withPlain && matches(state.shown, settings)) return state.shown;
    settings.seed = chooseSeed(settings.seed);
    $("seed").value = settings.seed;
    return { created: Date.now(), settings, made: newSide(), plain: null };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showError(error.message);
    return null;
  }
}

const blobsOf = ({ made, plain }) =>
  [made, plain].flatMap((side) => (side ? [side.final, ...side.steps.map((step) => step?.blob)] : [])).filter(Boolean);

// ---- stage ----
const urls = new Map(); // of the blobs that the stage shows or offers

function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

function showImage(image) {
  state.shown = image;
  state.scale = null;
  const kept = new Set(image ? blobsOf(image) : []);
  render();
  for (const [blob, url] of urls)
    if (!kept.has(blob)) {
      URL.revokeObjectURL(url);
      urls.delete(blob);
    }
}

/** The latest scale of a side that computed anything, from 1; 0: none yet. */
const latestScale = (side) => side.steps.findLastIndex((step) => step?.computed.some(Boolean)) + 1;

/** What a side shows at the chosen scale: a preview, or the finished image from its last scale on. */
function blobOf(side) {
  const latest = latestScale(side);
  if (side.final && (state.scale === null || state.scale >= latest)) return side.final;
  const steps = side.steps.slice(0, state.scale ?? latest);
  return steps.findLast((step) => step?.blob)?.blob ?? side.final;
}

/** The side that is being made, if it is one of this image. */
const runningSide = (image) => (image && state.running?.image === image ? state.running.side : null);

function render() {
  const image = state.shown;
  const running = Boolean(state.running);
  $("generate").setAttribute("aria-disabled", running);
  $("compare").setAttribute("aria-disabled", running);
  $("cancel").hidden = !running;
  $("empty").hidden = Boolean(image);
  renderStage(image);
  renderScales(image);
  renderFacts(image);
}

function renderStage(image) {
  const { made, plain } = image ?? {};
  showSide($("image-made"), made, image && `${image.settings.prompt}, ${made.method ?? "being made"}`);
  showSide($("image-plain"), plain, image && `${image.settings.prompt}, plain`);
  const both = Boolean(plain) && !$("image-plain").hidden;
  for (const id of ["split", "divider", "tag-plain", "tag-made"]) $(id).hidden = !both;
  $("tag-made").textContent = made?.method ?? "";
  $("canvas").classList.toggle("both", both);
  $("canvas").classList.toggle("waiting", Boolean(image) && $("image-made").hidden);
  if (image) $("canvas").style.setProperty("aspect-ratio", image.settings.size.replace("x", " / "));
  else $("canvas").style.removeProperty("aspect-ratio");
  moveSplit();
  renderMap(made);
  renderBar(image);
}

function showSide(element, side, description) {
  const blob = side && blobOf(side);
  element.hidden = !blob;
  element.alt = blob ? description : "";
  if (!blob) return element.removeAttribute("src");
  if (element.src !== urlOf(blob)) element.src = urlOf(blob);
  element.dataset.scale = state.scale ?? latestScale(side);
}

function renderMap(side) {
  const scale = Math.min(state.scale ?? Infinity, side ? latestScale(side) : 0);
  const step = scale > 0 ? side.steps[scale - 1] : null;
  $("map").hidden = $("legend").hidden = !step || !$("show-map").checked;
  if (!step) return;
  // A veil over what was not computed: the image itself stays readable where the work was done.
  paint($("map"), step, (share) => [13, 16, 40, 200 * (1 - share)]);
  const what = `Scale ${scale}, ${step.grid[0]} × ${step.grid[1]} cells`;
  $("map").ariaLabel = `${what}: ${percent(shareOf(step))} computed`;
  $("legend-text").textContent = `${what}. Clear: computed in all layers. Dark: in none, taken over from before.`;
}

function renderBar(image) {
  const side = runningSide(image);
  $("bar").hidden = !side;
  if (!side) return;
  const share = side.steps.length ? latestScale(side) / side.steps.length : 0;
  $("bar").style.setProperty("--share", share);
  $("bar").ariaValueNow = latestScale(side);
  $("bar").ariaValueMax = side.steps.length || 1;
}

const shareOf = (step) => step.computed.reduce((sum, value) => sum + value, 0) / 255 / step.computed.length;

/** Draw a map of computed cells, a pixel for each; the style sheet makes it as large as its place. */
function paint(canvas, { grid: [height, width], computed }, color) {
  const pixels = new ImageData(width, height);
  computed.forEach((value, i) => pixels.data.set(color(value / 255), 4 * i));
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

// ---- scales ----
function renderScales(image) {
  const running = runningSide(image);
  const side = running ?? image?.made;
  const count = side?.steps.length || (running && image.settings.previews && state.info.scales) || 0;
  $("scales").hidden = !count;
  if (!count) return;
  const plain = side === image.plain ? "of the plain image. " : "";
  $("scales-note").textContent = `${plain}Bright cells are computed; choose a scale to see the image as it was then.`;
  const row = $("scale-row");
  while (row.children.length > count) row.lastChild.remove();
  while (row.children.length < count) row.append(newScale(row.children.length + 1));
  [...row.children].forEach((item, i) => updateScale(item, i + 1, side.steps[i]));
  const looked = row.children[(state.scale ?? latestScale(side)) - 1];
  for (const radio of row.querySelectorAll("input")) radio.checked = radio.parentNode === looked;
  if (looked) row.scrollLeft += looked.offsetLeft - row.scrollLeft - row.clientWidth / 2; // in sight on a phone
}

function newScale(scale) {
  const radio = make("input", { type: "radio", name: "scale", value: scale });
  radio.addEventListener("change", () => ((state.scale = scale), render()));
  return make("label", {}, radio, make("canvas", { ariaHidden: "true" }), make("b"), make("span"));
}

const drawn = new WeakMap(); // which step a place of the row shows: a map is drawn once

function updateScale(item, scale, step) {
  const [radio, canvas, grid, share] = item.children;
  if (drawn.get(item) === step) return;
  drawn.set(item, step);
  const part = step ? shareOf(step) : 0;
  radio.disabled = !part;
  item.classList.toggle("made", part > 0);
  grid.textContent = step ? `${step.grid[0]}×${step.grid[1]}` : "·";
  const cells = step && number(step.tokens ?? Math.round(part * step.computed.length));
  share.textContent = !step ? "" : !part ? "left out" : part > 0.995 ? cells : `${cells} · ${percent(part)}`;
  radio.ariaLabel = step
    ? `Scale ${scale}: ${step.grid[0]} by ${step.grid[1]} cells, ${cells} computed, ${percent(part)}`
    : `Scale ${scale}: not made`;
  if (step) paint(canvas, step, (c) => [40 + 215 * c, 38 + 126 * c, 54 + 34 * c, 255]);
  else canvas.width = canvas.height = 1;
}

// ---- facts ----
const tokenShare = (side) => side.tokens / side.tokensPlain;
const summary = (side) =>
  [`Finished in ${seconds(side.seconds)} with ${percent(tokenShare(side))} of the tokens.`, ...side.warnings.map(sentence)].join(" ");

function comparison({ made, plain }) {
  const ratio = plain.seconds / made.seconds;
  const speed = ratio >= 1 ? `${ratio.toFixed(1)}× faster` : `${(1 / ratio).toFixed(1)}× slower`;
  return [speed, `than plain, with ${percent(made.tokens / plain.tokens)} of the tokens`];
}

function renderFacts(image) {
  const { made, plain, settings } = image ?? {};
  const side = runningSide(image);
  $("facts").hidden = !made?.final && !side;
  $("result").hidden = $("actions").hidden = $("about").hidden = !made?.final;
  [$("headline").textContent, $("subline").textContent] = side ? progress(side, settings) : made?.final ? result(image) : ["", ""];
  if (!made?.final) return;
  const rows = [plain?.final && ["Plain", plain], [made.method === "none" ? "Plain" : made.method, made]].filter(Boolean);
  $("numbers").tBodies[0].replaceChildren(...rows.map(([name, side]) => numbersRow(name, side)));
  $("warnings").replaceChildren(...made.warnings.map((text) => make("li", {}, sentence(text))));
  $("warnings").hidden = !made.warnings.length;
  offerDownload($("download"), made, `${fileName(settings)}.png`);
  offerDownload($("download-plain"), plain, `${fileName(settings)}-plain.png`);
  $("about").textContent = `${settings.model}, ${settings.size}, seed ${settings.seed}. The PNG file has these settings inside.`;
}

/** Nothing tells a request that waits for its turn from one whose first scale is made. */
const progress = (side, { previews }) =>
  side.steps.length
    ? [seconds(side.seconds), `scale ${latestScale(side)} of ${side.steps.length}`]
    : ["…", previews ? "waiting for the first scale" : "being made"];

const result = (image) =>
  image.plain?.final ? comparison(image) : [seconds(image.made.seconds), `${percent(tokenShare(image.made))} of a plain image's tokens`];

const numbersRow = (name, side) =>
  make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, seconds(side.seconds)), make("td", {}, number(side.tokens)));

function fileName({ prompt, seed }) {
  const words = prompt.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? ["image"];
  return `${words.join("-").slice(0, 60)}-${seed}`;
}

/** The API's own bytes: what the server wrote into the file stays there. */
function offerDownload(link, side, name) {
  link.hidden = !side?.final;
  if (side?.final) Object.assign(link, { href: urlOf(side.final), download: name });
}

// ---- copy ----
const shellQuote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const usesKey = () => Boolean(session.getItem(API_KEY)); // the code names a variable, never the key itself

function curlOf(settings) {
  const key = usesKey() ? ` \\\n  -H "Authorization: Bearer $NEXTSCALE_API_KEY"` : "";
  return `curl --silent --show-error --fail-with-body ${shellQuote(`${location.origin}/v1/images/generations`)} \\
  -H 'Content-Type: application/json'${key} \\
  -d ${shellQuote(JSON.stringify(requestBody(settings)))} \\
  | python3 -c 'import base64, json, sys; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))' \\
  > ${shellQuote(`${fileName(settings)}.png`)}\n`;
}

/** OpenAI's client takes its own fields by name and ours as extra_body. JSON's strings and numbers are Python's. */
function pythonOf(settings) {
  const { model, prompt, size, quality, ...extra } = requestBody(settings);
  const named = Object.entries({ model, prompt, size, quality }).filter(([, value]) => value !== undefined);
  return `import base64
${usesKey() ? "import os\n" : ""}
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${usesKey() ? 'os.environ["NEXTSCALE_API_KEY"]' : '"none"'})
result = client.images.generate(
${named.map(([name, value]) => `    ${name}=${JSON.stringify(value)},`).join("\n")}
    extra_body=${JSON.stringify(extra)},
)
with open(${JSON.stringify(`${fileName(settings)}.png`)}, "wb") as file:
    file.write(base64.b64decode(result.data[0].b64_json))
`;
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    note(`Copied as ${what}.`);
    announce(`Copied as ${what}.`);
  } catch {
    // Without https and away from localhost a page may not write to the clipboard.
    $("text").value = text;
    const closed = ask($("text-dialog"));
    $("text").select();
    await closed;
  }
}

// ---- history ----
const promised = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let database = null;
let otherTabs = null;

async function openHistory() {
  try {
    const request = indexedDB.open("nextscale", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("images", { keyPath: "id", autoIncrement: true });
    otherTabs = new BroadcastChannel("nextscale-history");
    database = await promised(request);
  } catch {
    return note("This browser lets the page keep no history.");
  }
  otherTabs.onmessage = reporting("The history could not be read: ", loadHistory);
  await otherTabs.onmessage();
}

/** Read all images of the history, the newest first. */
async function readHistory() {
  const images = database.transaction("images").objectStore("images");
  return (await promised(images.getAll())).reverse();
}

/** Change the history; a full disk is found out only when the transaction ends. */
function change(action) {
  const transaction = database.transaction("images", "readwrite");
  const request = action(transaction.objectStore("images"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error ?? request.error);
  });
}

async function loadHistory() {
  state.history = await readHistory();
  renderHistory();
}

function historyChanged() {
  otherTabs.postMessage("changed");
  return loadHistory();
}

async function saveImage(image) {
  if (!database) return;
  const { id, created, settings, made, plain } = image;
  try {
    const record = { ...(id && { id }), created, settings, made, plain: plain?.final ? plain : null };
    image.id = await change((images) => images.put(record));
    await dropOldest(image.id);
    await historyChanged();
  } catch (error) {
    const full = "the browser's storage is full. Delete others there to make room";
    const why = error.name === "QuotaExceededError" ? full : error.message;
    showError(`The image could not be stored in the history: ${why}`);
  }
}

/** Delete what is beyond the limits, but never the image `kept`. */
async function dropOldest(kept) {
  let bytes = 0;
  for (const [place, image] of (await readHistory()).entries()) {
    bytes += blobsOf(image).reduce((sum, blob) => sum + blob.size, 0); // the maps are small beside the blobs
    const beyond = place >= HISTORY_LIMIT || bytes > HISTORY_BYTES;
    if (beyond && image.id !== kept) await change((images) => images.delete(image.id));
  }
}

async function deleteImage(image) {
  await change((images) => images.delete(image.id));
  if (state.shown?.id === image.id) delete state.shown.id;
  await historyChanged();
  announce("Deleted.");
}

async function clearHistory() {
  if (!(await ask($("clear-dialog")))) return;
  await change((images) => images.clear());
  delete state.shown?.id;
  await historyChanged();
  announce("The history is empty.");
  $("prompt").focus();
}

let thumbnails = [];

function renderHistory() {
  const focused = document.activeElement.closest("#images button");
  const place = [...$("images").children].indexOf(focused?.parentNode);
  thumbnails.forEach(URL.revokeObjectURL);
  thumbnails = state.history.map((image) => URL.createObjectURL(image.made.final));
  $("images").replaceChildren(...state.history.map(historyItem));
  $("history").hidden = !state.history.length;
  if (focused) focusAgain(focused, place);
}

/** Focus the button that took the place of `focused`; where its image is gone, that of the next one. */
function focusAgain(focused, place) {
  const items = [...$("images").children];
  const same = items.find((item) => item.dataset.id === focused.parentNode.dataset.id);
  const near = items[Math.min(place, items.length - 1)];
  const button = same ? same.querySelector(focused.className ? ".remove" : "button") : near?.firstChild;
  (button ?? $("prompt")).focus({ preventScroll: true });
}

async function restoreImage(image) {
  showError("");
  showImage(state.running?.image.id === image.id ? state.running.image : image); // needs no server
  $("canvas").scrollIntoView({ block: "nearest" });
  announce(`Shown again: ${titleOf(image)}.`);
  await fillForm(image.settings);
}

const titleOf = ({ settings, made, plain }) =>
  `${settings.prompt}, seed ${settings.seed}, ${made.method}${plain ? " and plain" : ""}`;

function historyItem(image, place) {
  const title = titleOf(image);
  const restore = make("button", { type: "button", title, ariaLabel: `Show again: ${title}` });
  restore.append(make("img", { src: thumbnails[place], alt: "", loading: "lazy" }));
  restore.addEventListener("click", reporting("", () => restoreImage(image)));
  const remove = make("button", { type: "button", className: "remove", ariaLabel: `Delete: ${title}` }, "×");
  remove.addEventListener("click", reporting("The image could not be deleted: ", () => deleteImage(image)));
  const item = make("li", {}, restore, remove);
  item.dataset.id = image.id;
  return item;
}

// ---- completion ----
const completion = { options: [], active: -1, start: 0 };

/** The known words that begin like what stands before the caret, which may be several words ("teddy b"). */
function findWords(all) {
  const field = $("prompt");
  const before = field.value.slice(0, field.selectionStart);
  const starts = [...before.matchAll(/[\p{L}\p{N}]+/gu)].map((found) => found.index).slice(-3);
  for (const start of starts) {
    const typed = before.slice(start).toLowerCase();
    if (!all && state.words.some(({ word }) => word === typed)) break; // after "snow", "snowman" would hide the buttons
    const found = state.words.filter(({ word }) => word.startsWith(typed) && word !== typed);
    if (found.length) return { start, options: found.slice(0, all ? undefined : 8) };
  }
  return { start: field.selectionStart, options: all ? state.words : [] };
}

function suggest(all = false) {
  Object.assign(completion, findWords(all), { active: -1 });
  const list = $("words");
  const option = ({ word, kind }, i) =>
    make("li", { id: `word-${i}`, role: "option", ariaSelected: "false" }, word, make("small", {}, kind));
  list.replaceChildren(...completion.options.map(option));
  const count = completion.options.length;
  list.hidden = !count;
  $("prompt").removeAttribute("aria-activedescendant");
  const text = count ? `${count} known ${count > 1 ? "words" : "word"}, ↓ to choose.` : "";
  if ($("live").textContent !== text) announce(text); // not with every letter
}

function closeWords() {
  if (!$("words").hidden) announce("");
  $("words").hidden = true;
  $("prompt").removeAttribute("aria-activedescendant");
}

function moveIn(step) {
  const items = $("words").children;
  if (completion.active >= 0) items[completion.active].ariaSelected = "false";
  completion.active = (completion.active + step + items.length + (completion.active < 0 && step < 0)) % items.length;
  const item = items[completion.active];
  item.ariaSelected = "true";
  item.scrollIntoView({ block: "nearest" });
  $("prompt").setAttribute("aria-activedescendant", item.id);
}

function complete(index) {
  const field = $("prompt");
  field.setRangeText(`${completion.options[index].word} `, completion.start, field.selectionStart, "end");
  closeWords();
}

function chooseWord(event) {
  const index = [...$("words").children].indexOf(event.target.closest("li"));
  if (index >= 0) complete(index);
}

function promptKey(event) {
  const open = !$("words").hidden;
  if (event.isComposing) return;
  if (state.words.length && ["ArrowDown", "ArrowUp"].includes(event.key) && (open || event.altKey || !event.target.value)) {
    event.preventDefault();
    if (!open) suggest(true);
    if (!$("words").hidden) moveIn(event.key === "ArrowDown" ? 1 : -1);
  } else if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    if (open && completion.active >= 0 && !event.ctrlKey && !event.metaKey) return complete(completion.active);
    closeWords();
    generate(false);
    event.stopPropagation(); // or Ctrl+Enter would start twice
  } else if (event.key === "Escape" && open) {
    event.stopPropagation(); // the first Escape closes the list only
    closeWords();
  }
}

// ---- setup ----
let loading = { name: null, done: null, controller: new AbortController() }; // of the model that was chosen last

/** Load the chosen model once. Another choice meanwhile stops this one, which then fails with an AbortError. */
function loadModel() {
  const name = $("model").value;
  if (loading.name !== name) {
    loading.controller.abort();
    const controller = new AbortController();
    loading = { name, controller, done: showModel(name, controller.signal) };
  }
  return loading.done;
}

async function showModel(name, signal) {
  try {
    const model = await (await request(`/v1/models/${encodeURIComponent(name)}`, { signal })).json();
    state.methods = await (await request(`/v1/methods?model=${encodeURIComponent(name)}`, { signal })).json();
    state.info = model.nextscale;
  } catch (error) {
    signal.throwIfAborted(); // whatever failed, it does not matter any more
    loading.name = null; // the next one asks again
    throw error;
  }
  showSizes(state.info);
  showMethods(state.methods);
  showVocabulary(state.info.vocabulary ?? {});
  showPromptKind(state.info);
}

function showSizes({ sizes, trained_sizes: trained, default_size: usual }) {
  const option = (size) => make("option", { value: size, selected: size === usual }, size.replace("x", " × "));
  const others = sizes.filter((size) => !trained.includes(size)).map(option);
  $("size").replaceChildren(...trained.map(option));
  if (others.length) $("size").append(make("optgroup", { label: "Not trained" }, ...others));
}

function showMethods({ data, qualities, default: usual }) {
  const option = (value, text) => make("option", { value }, text);
  const plainly = (name) => (name === "none" ? "plain" : name);
  const known = ["low", "medium", "high", "max"].filter((quality) => qualities[quality]);
  const presets = data.flatMap(({ id, presets }) => presets.map((preset) => option(`${id}:${preset}`, `${id}:${preset}`)));
  $("method").replaceChildren(
    option("", `Default (${plainly(usual)})`),
    option("none", "Plain: everything computed"),
    make("optgroup", { label: "Quality" }, ...known.map((q) => option(`quality:${q}`, `${q} (${plainly(qualities[q])})`))),
    make("optgroup", { label: "Methods" }, ...presets),
    option("custom", "Another, with settings …"),
  );
  methodChanged();
}

function methodChanged() {
  const choice = $("method").value;
  $("custom-field").hidden = choice !== "custom";
  const { method, quality } = methodFields({ choice, custom: $("custom").value });
  const name = method ?? state.methods?.qualities[quality ?? "auto"] ?? "";
  const known = state.methods?.data.find(({ id }) => id === name.split(/[:+]/)[0]);
  $("method-hint").textContent = known?.summary ?? (name === "none" ? "Every token of every scale is computed." : "");
}

function showVocabulary(vocabulary) {
  state.words = Object.entries(vocabulary).flatMap(([kind, words]) => words.map((word) => ({ word, kind })));
  const known = state.words.length > 0;
  const field = $("prompt");
  // ARIA in HTML allows a <textarea> no role, so nothing tells that the list is open: suggest() says it.
  const attributes = { "aria-autocomplete": "list", "aria-controls": "words", "aria-haspopup": "listbox" };
  for (const [name, value] of Object.entries(attributes)) known ? field.setAttribute(name, value) : field.removeAttribute(name);
  $("vocabulary").hidden = !known;
  const terms = Object.entries(vocabulary).map(([kind, words]) => [make("dt", {}, `${kind} (${words.length})`), make("dd", {}, words.join(", "))]);
  $("vocabulary-list").replaceChildren(...terms.flat());
}

function showPromptKind({ takes_labels: labels, vocabulary }) {
  $("prompt-label").textContent = labels ? "Class number" : "Prompt";
  $("negative-field").hidden = labels;
  $("prompt-hint").textContent = `Enter generates, Escape cancels${vocabulary ? ", ↓ in an empty prompt lists the known words" : ""}.`;
  $("empty-text").textContent = labels ? "Type a class number, or start with one of these." : "Type a prompt, or start with one of these.";
  const examples = EXAMPLES[labels ? "labels" : vocabulary ? "words" : "text"];
  $("examples").replaceChildren(...examples.map((text) => make("li", {}, exampleButton(text))));
}

function exampleButton(text) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", () => {
    $("prompt").value = text;
    $("generate").focus(); // this button is about to go, and in the prompt a phone would open its keyboard
    generate(false);
  });
  return button;
}

let connected = null;

/** Load the list of models once; whoever asks meanwhile waits for the same answer. */
function connect() {
  connected ??= showModels().catch((error) => {
    connected = null; // the next one asks again
    throw error;
  });
  return connected;
}

async function showModels() {
  await waitUntilReady();
  const { data } = await (await request("/v1/models")).json();
  $("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  $("model-field").hidden = data.length < 2;
  $("model-name").hidden = data.length > 1;
  $("model-name").textContent = data[0]?.id ?? "";
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").ariaPressed = dark;
}

function setUpTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(local.getItem(THEME) ? local.getItem(THEME) === "dark" : system.matches);
  system.addEventListener("change", follow);
  follow();
  on("theme", "click", () => {
    const dark = document.documentElement.dataset.theme !== "dark";
    local.setItem(THEME, dark ? "dark" : "light");
    setTheme(dark);
  });
}

function moveSplit() {
  const share = Number($("split").value);
  $("canvas").style.setProperty("--split", `${share}%`);
  $("split").ariaValueText = `${share} % plain, ${100 - share} % ${$("tag-made").textContent}`;
}

const cancel = () => state.running?.controller.abort();

function pageKey(event) {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault(); // a button in focus is not pressed besides
    generate(false);
  }
  if (event.key === "Escape") cancel();
}

/** Draw a heart that grows scale by scale, for a stage that is empty. */
function drawGrowing() {
  const inHeart = (x, y) => x * x + (y - 0.8 * Math.sqrt(Math.abs(x))) ** 2 < 1;
  const squares = [1, 2, 4, 8, 16].flatMap((cells, n) => {
    const pitch = 24 / cells;
    return Array.from({ length: cells * cells }, (_, i) => {
      const [column, row] = [i % cells, Math.floor(i / cells)];
      const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const lit = cells < 4 || inHeart((2.2 * (column + 0.5)) / cells - 1.1, 1.55 - (2.6 * (row + 0.5)) / cells);
      const place = { x: 29 * n + column * pitch, y: row * pitch, width: 0.94 * pitch, height: 0.94 * pitch, class: lit ? "lit" : "" };
      for (const [name, value] of Object.entries(place)) square.setAttribute(name, value);
      return square;
    });
  });
  $("growing").replaceChildren(...squares);
}

function listen() {
  on("form", "submit", (event) => (event.preventDefault(), generate(false)));
  on("compare", "click", () => generate(true));
  on("cancel", "click", cancel);
  on("model", "change", reporting("", loadModel));
  on("method", "change", methodChanged);
  on("custom", "input", methodChanged);
  on("seed", "input", () => setSeeding($("seed").value ? "keep" : "random"));
  on("split", "input", moveSplit);
  on("show-map", "change", render);
  on("copy-curl", "click", () => copy(curlOf(state.shown.settings), "curl"));
  on("copy-python", "click", () => copy(pythonOf(state.shown.settings), "Python"));
  on("clear", "click", reporting("The history could not be deleted: ", clearHistory));
  on("prompt", "input", () => state.words.length && suggest());
  on("prompt", "keydown", promptKey);
  on("prompt", "blur", closeWords);
  on("words", "mousedown", (event) => event.preventDefault()); // the focus stays in the prompt
  on("words", "click", chooseWord);
  document.addEventListener("keydown", pageKey);
}

setUpTheme();
drawGrowing();
listen();
$("settings").open = matchMedia("(min-width: 760px)").matches; // on a phone the image comes first
await Promise.all([openHistory(), connect().then(loadModel).catch(report)]);
