// Keeps the page's live part current: asks for the same page every five seconds while it is visible.
const EVERY = 5000;
const part = document.querySelector("[data-live]");
let etag = "";

async function refresh() {
  if (document.hidden) return;
  const answer = await fetch(location.href, {
    cache: "no-store",
    redirect: "manual",
    headers: etag ? { "If-None-Match": etag } : {},
  });
  if (answer.type === "opaqueredirect") location.reload(); // the session has ended
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(String(answer.status));
  etag = answer.headers.get("ETag") ?? "";
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.querySelector("[data-live]");
  if (fresh) replace(fresh);
}

// Leaves the focus, and how far tables are scrolled, as they are.
function replace(fresh) {
  const same = (one) => one.href ?? one.getAttribute("aria-label");
  const focus = part.contains(document.activeElement) ? same(document.activeElement) : null;
  const scrolled = new Map([...part.querySelectorAll(".scroll")].map((each) => [same(each), each.scrollLeft]));
  part.replaceChildren(...fresh.childNodes);
  for (const each of part.querySelectorAll(".scroll")) each.scrollLeft = scrolled.get(same(each)) ?? 0;
  if (focus) [...part.querySelectorAll("a, .scroll")].find((each) => same(each) === focus)?.focus({ preventScroll: true });
}

async function keep() {
  const note = document.querySelector("[data-stale]");
  try {
    await refresh();
    note.hidden = true;
  } catch {
    note.hidden = false;
  }
  setTimeout(keep, EVERY);
}

if (part) setTimeout(keep, EVERY);

// Pictures of charts: what is drawn, in the colours of the page.
const SCALE = 2;
const TITLE = 28;
const ROW = 18;

function picture(figure) {
  const svg = figure.querySelector("svg");
  const { width, height } = svg.viewBox.baseVal;
  const names = [...figure.querySelectorAll(".legend li")];
  const curves = [...svg.querySelectorAll(".curve")];
  const canvas = document.createElement("canvas");
  canvas.width = SCALE * width;
  canvas.height = SCALE * (TITLE + height + ROW * names.length);
  const pen = canvas.getContext("2d");
  pen.scale(SCALE, SCALE);
  pen.fillStyle = getComputedStyle(figure).backgroundColor;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  const title = figure.querySelector("figcaption");
  write(pen, title, getComputedStyle(title).color, 12, TITLE - 8);
  pen.translate(0, TITLE);
  for (const each of svg.querySelectorAll("line, polyline, circle, text")) draw(pen, each);
  pen.translate(0, height);
  names.forEach((name, row) => {
    trace(pen, curves[row], [[12, ROW * row + 5], [44, ROW * row + 5]]);
    write(pen, name, getComputedStyle(name).color, 52, ROW * row + 9);
  });
  return canvas;
}

function draw(pen, each) {
  const at = (name) => Number(each.getAttribute(name));
  const style = getComputedStyle(each);
  if (each.tagName === "text") write(pen, each, style.fill, at("x"), at("y"), each.getAttribute("text-anchor"));
  else if (each.tagName === "line") trace(pen, each, [[at("x1"), at("y1")], [at("x2"), at("y2")]]);
  else if (each.tagName === "polyline") trace(pen, each, [...each.points].map(({ x, y }) => [x, y]));
  else {
    pen.fillStyle = style.fill;
    pen.beginPath();
    pen.arc(at("cx"), at("cy"), at("r"), 0, 2 * Math.PI);
    pen.fill();
  }
}

function trace(pen, styled, points) {
  const style = getComputedStyle(styled);
  pen.strokeStyle = style.stroke;
  pen.lineWidth = parseFloat(style.strokeWidth);
  pen.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(",").map(parseFloat));
  pen.beginPath();
  for (const point of points) pen.lineTo(...point);
  pen.stroke();
}

function write(pen, each, colour, x, y, anchor = "start") {
  const { fontWeight, fontFamily } = getComputedStyle(each);
  pen.font = `${fontWeight} 12px ${fontFamily}`;
  pen.fillStyle = colour;
  pen.textAlign = anchor === "middle" ? "center" : anchor;
  pen.fillText(each.textContent, x, y);
}

for (const figure of document.querySelectorAll("[data-savable] figure")) {
  const button = document.createElement("button");
  button.textContent = "Save as PNG";
  button.addEventListener("click", () => {
    picture(figure).toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = `fedpress ${figure.querySelector("figcaption").textContent}.png`.toLowerCase().replaceAll(" ", "-");
      link.click();
      URL.revokeObjectURL(link.href);
    });
  });
  figure.append(button);
}
