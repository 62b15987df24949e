// Curves that can be zoomed together, and samples that play together. Everything comes from the page itself.
"use strict";

const WIDTH = 640, HEIGHT = 260, LEFT = 62, RIGHT = 12, TOP = 10, BOTTOM = 26;
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = [];
let range = null; // the steps that are shown: [from, to], or null for all

function node(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function color(index, count) {
  // Many curves are ordered (noise levels): a ramp. Few are not: hues that differ for most eyes.
  if (count > 4) return `hsl(${Math.round(260 - 230 * index / (count - 1))} 75% 52%)`;
  return ["#2f6fdb", "#e0762a", "#2a9d5c", "#b0489f"][index];
}

function shown(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(5)));
}

function ticks(from, to, count) {
  const rough = (to - from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

class Chart {
  constructor(figure, spec) {
    this.curves = spec.curves.map((curve, index) => ({
      ...curve, color: color(index, spec.curves.length), visible: true,
    }));
    this.svg = figure.querySelector("svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.isLogarithmic = false;
    this.makeLegend(figure.querySelector(".legend"));
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.forget());
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("dblclick", () => zoom(null));
  }

  makeLegend(legend) {
    for (const curve of this.curves) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const line = document.createElement("i");
      line.style.background = curve.color;
      const value = document.createElement("span");
      button.append(line, curve.label, " ", value);
      button.addEventListener("click", () => {
        curve.visible = !curve.visible;
        button.setAttribute("aria-pressed", String(curve.visible));
        this.draw();
      });
      curve.value = value;
      legend.append(button);
    }
    this.step = document.createElement("span");
    legend.append(this.step);
  }

  // Which part of a curve is seen: one point more on each side, so that lines leave the picture where they should.
  part(curve) {
    const [from, to] = this.x;
    let first = 0, end = curve.x.length;
    while (first < end && curve.x[first] < from) first++;
    while (end > first && curve.x[end - 1] > to) end--;
    return [Math.max(0, first - 1), Math.min(curve.x.length, end + 1), first, end];
  }

  measure() {
    this.x = range ?? data.range;
    const values = [];
    for (const curve of this.curves.filter((one) => one.visible)) {
      const [, , first, end] = this.part(curve);
      for (let index = first; index < end; index++) if (curve.y[index] !== null) values.push(curve.y[index]);
    }
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low > high) [low, high] = [0, 1];
    this.isLogarithmic = document.getElementById("logarithmic").checked && low > 0;
    if (this.isLogarithmic) [low, high] = [Math.log10(low), Math.log10(high)];
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    this.y = [low - margin, high + margin];
  }

  atX(step) { return LEFT + (step - this.x[0]) / (this.x[1] - this.x[0]) * (WIDTH - LEFT - RIGHT); }
  atY(value) {
    const place = this.isLogarithmic ? Math.log10(value) : value;
    return HEIGHT - BOTTOM - (place - this.y[0]) / (this.y[1] - this.y[0]) * (HEIGHT - TOP - BOTTOM);
  }

  draw() {
    this.measure();
    const svg = this.svg;
    svg.replaceChildren();
    Object.assign(svg.dataset, { xMin: this.x[0], xMax: this.x[1], yMin: this.y[0], yMax: this.y[1] });
    const box = { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };
    node(svg, "rect", { ...box, fill: "transparent" });
    const inside = node(svg, "svg", { ...box, viewBox: `${box.x} ${box.y} ${box.width} ${box.height}` });
    for (const at of ticks(...this.y, 5)) {
      const value = this.isLogarithmic ? 10 ** at : at;
      const y = this.atY(value).toFixed(1);
      node(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y });
      node(svg, "text", { x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end" }, shown(value));
    }
    for (const at of ticks(...this.x, 7).filter(Number.isInteger)) {
      node(svg, "text", { x: this.atX(at).toFixed(1), y: HEIGHT - 8, "text-anchor": "middle" }, String(at));
    }
    for (const step of data.resumes) {
      const x = this.atX(step).toFixed(1);
      const line = node(inside, "line", { class: "resume", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });
      node(line, "title", {}, `resumed after step ${step}`);
    }
    for (const curve of this.curves.filter((one) => one.visible)) this.drawCurve(inside, curve);
    svg.append(inside);
    this.cursor = node(svg, "line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.selection = node(svg, "rect", {
      class: "selection", y: TOP, height: box.height, x: LEFT, width: 0, visibility: "hidden",
    });
  }

  drawCurve(parent, curve) {
    const [first, end] = this.part(curve);
    let path = "", isOn = false;
    for (let index = first; index < end; index++) {
      const value = curve.y[index], x = this.atX(curve.x[index]).toFixed(1);
      if (value === null) {
        isOn = false;
        const y = HEIGHT - BOTTOM;
        const mark = node(parent, "path", { class: "missing", d: `M${x},${y - 8}l4,8h-8z` });
        node(mark, "title", {}, `${curve.label} is not finite at step ${curve.x[index]}`);
        continue;
      }
      // A point without neighbours is a line of no length: round ends make it a dot.
      path += isOn ? `L${x},${this.atY(value).toFixed(1)}` : `M${x},${this.atY(value).toFixed(1)}h0`;
      isOn = true;
    }
    node(parent, "path", { class: "curve", d: path, stroke: curve.color, "data-label": curve.label });
  }

  stepAt(event) {
    const place = this.svg.getBoundingClientRect();
    const x = (event.clientX - place.left) / place.width * WIDTH;
    const part = Math.min(1, Math.max(0, (x - LEFT) / (WIDTH - LEFT - RIGHT)));
    return this.x[0] + part * (this.x[1] - this.x[0]);
  }

  press(event) {
    if (event.button !== 0) return;
    this.from = this.stepAt(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    const step = this.stepAt(event);
    this.read(step);
    if (this.from === undefined) return;
    const [x1, x2] = [this.atX(Math.min(this.from, step)), this.atX(Math.max(this.from, step))];
    for (const [key, value] of Object.entries({ x: x1, width: x2 - x1, visibility: "visible" })) {
      this.selection.setAttribute(key, value);
    }
  }

  release(event) {
    if (this.from === undefined) return;
    const [from, to] = [this.from, this.stepAt(event)].sort((a, b) => a - b);
    this.forget();
    // Less is a click.
    if (this.atX(to) - this.atX(from) > 5) zoom([from, Math.max(to, from + 1)]);
  }

  forget() {
    this.from = undefined;
    this.selection.setAttribute("visibility", "hidden");
  }

  // Values at a step, beside the curves' names; null for none.
  read(step) {
    this.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    this.step.textContent = step === null ? "" : `step ${Math.round(step)}`;
    if (step !== null) {
      this.cursor.setAttribute("x1", this.atX(step));
      this.cursor.setAttribute("x2", this.atX(step));
    }
    for (const curve of this.curves) {
      curve.value.textContent = step === null ? "" : shown(curve.y[nearest(curve.x, step)]);
    }
  }
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function zoom(to) {
  range = to;
  for (const chart of charts) chart.draw();
}

document.querySelectorAll(".chart").forEach((figure, index) => charts.push(new Chart(figure, data.charts[index])));
document.getElementById("logarithmic").addEventListener("change", () => zoom(range));
document.getElementById("whole").addEventListener("click", () => zoom(null));
zoom(null);

// A long run has more videos than a browser should open at once: each shows its first frame when it comes into sight.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((one) => one.isIntersecting)) {
    entry.target.preload = "metadata";
    seen.unobserve(entry.target);
  }
}, { rootMargin: "200px" });
document.querySelectorAll("video, audio").forEach((media) => seen.observe(media));

document.querySelectorAll("button.together").forEach((button) => button.addEventListener("click", () => {
  for (const media of document.getElementById(button.dataset.row).querySelectorAll("video, audio")) {
    media.currentTime = 0;
    media.muted = true;
    media.play();
  }
}));
