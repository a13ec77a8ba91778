"use strict";
// One small chart over the last minutes: axis values, a legend, and a cursor that says the values of
// a moment, by pointer or by arrow keys.

const WINDOW_SAMPLES = 300;
const MARGIN = { left: 34, right: 4, top: 6, bottom: 15 };

// The next number that is round, and whose half is.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

// Args of a chart: `title`, `unit`, `series` of { name, look, style, of(sample) } with style "line",
// "thin", "area" or "stack", `least` as smallest top of the axis, `top(samples)` for a fixed one,
// `format(value)`, `axis(value)` for axis values, `tipUnit` where the cursor's unit differs, `value(samples)` for the large number, `sub(samples, data)` for the line below.
class Chart {
  constructor(spec) {
    this.spec = { format: shown, ...spec };
    this.samples = [];
    this.cursor = null;
    this.value = el("div", { className: "value" }, "–");
    this.sub = el("div", { className: "sub" });
    this.tip = el("div", { className: "tip", hidden: true });
    this.svg = svg("svg", { role: "img", tabindex: "0" });
    this.node = el("section", { className: "chart", "aria-label": spec.title },
      el("h3", {}, spec.title), this.value, this.sub, this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerdown", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerleave", () => this.setCursor(null));
    this.svg.addEventListener("blur", () => this.setCursor(null));
    this.svg.addEventListener("keydown", (event) => this.pressed(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // Args: samples, oldest first; data, the newest answer of the server.
  update(samples, data) {
    this.samples = samples;
    const value = this.spec.value(samples);
    const text = this.spec.format(value);
    this.value.replaceChildren(text, el("small", {}, value === null ? "" : " " + this.spec.unit));
    this.sub.replaceChildren(...this.legend(), ...this.spec.sub(samples, data).map((part) => el("span", {}, part)));
    this.svg.setAttribute("aria-label", `${this.spec.title}: now ${text} ${this.spec.unit}. Arrow keys read the last five minutes.`);
    this.draw();
  }

  legend() {
    if (this.spec.series.length < 2) return [];
    const last = this.samples.at(-1);
    // The first one's value stands above, large.
    return this.spec.series.map(({ name, look, of }, i) =>
      el("span", { className: "key " + look }, name + (i && last ? " " + this.spec.format(of(last)) : "")));
  }

  get scale() {
    const { width, height } = this.svg.getBoundingClientRect();
    const step = (width - MARGIN.left - MARGIN.right) / (WINDOW_SAMPLES - 1);
    const newest = this.samples.at(-1)?.number ?? 0;
    const top = this.top();
    const room = height - MARGIN.top - MARGIN.bottom;
    return {
      width, height, step, newest, top,
      x: (number) => width - MARGIN.right - (newest - number) * step,
      y: (value) => MARGIN.top + room * (1 - Math.min(value, top) / top),
    };
  }

  top() {
    if (this.spec.top) return this.spec.top(this.samples) || 4;
    let most = 0;
    for (const sample of this.samples) {
      for (const { of } of this.spec.series) most = Math.max(most, of(sample) ?? 0);
    }
    return roundUp(Math.max(most, this.spec.least));
  }

  draw() {
    const scale = this.scale;
    if (!scale.width) return; // not on the page now
    const nodes = this.axes(scale);
    let below = this.samples.map(() => 0);
    for (const { of, look, style } of this.spec.series) {
      const values = this.samples.map((sample) => of(sample));
      const upper = style === "stack" ? values.map((value, i) => value + below[i]) : values;
      const points = this.samples.map((sample, i) => ({ x: scale.x(sample.number), value: upper[i], base: style === "stack" ? below[i] : 0 }));
      nodes.push(...this.shapes(points, scale, look, style));
      if (style === "stack") below = upper;
    }
    nodes.push(...this.cursorNodes(scale));
    this.svg.setAttribute("viewBox", `0 0 ${scale.width} ${scale.height}`);
    this.svg.replaceChildren(...nodes);
  }

  axes({ width, height, top, y }) {
    const nodes = [];
    for (const value of [0, top / 2, top]) {
      const at = Math.round(y(value)) + 0.5;
      nodes.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
      nodes.push(svg("text", { x: MARGIN.left - 4, y: at + 3, "text-anchor": "end" }, (this.spec.axis ?? axisText)(value)));
    }
    nodes.push(svg("text", { x: MARGIN.left, y: height - 3 }, "5 min ago"));
    nodes.push(svg("text", { x: width - MARGIN.right, y: height - 3, "text-anchor": "end" }, "now"));
    return nodes;
  }

  shapes(points, { y }, look, style) {
    const at = (value) => y(value).toFixed(1);
    const nodes = [];
    for (const run of runsOf(points)) {
      const line = run.map((point, i) => `${i ? "L" : "M"}${point.x.toFixed(1)} ${at(point.value)}`).join("");
      if (style === "area" || style === "stack") {
        const back = run.toReversed().map((point) => `L${point.x.toFixed(1)} ${at(point.base)}`).join("");
        nodes.push(svg("path", { class: `area ${look} ${style === "stack" ? "solid" : ""}`, d: line + back + "Z" }));
      }
      if (style === "stack") continue;
      nodes.push(svg("path", { class: `line ${look} ${style === "thin" ? "thin" : ""}`, d: line }));
      // A line of one point is nothing to see.
      if (run.length === 1) nodes.push(svg("circle", { class: "point " + look, cx: run[0].x, cy: at(run[0].value), r: 1.8 }));
    }
    return nodes;
  }

  cursorNodes({ x, y, height }) {
    const sample = this.samples.find((each) => each.number === this.cursor);
    this.tip.hidden = sample === undefined;
    if (sample === undefined) return [];
    const parts = this.spec.series.map(({ name, of }) => `${name} ${this.spec.format(of(sample))}`);
    const time = new Date(sample.time_s * 1000).toLocaleTimeString();
    this.tip.textContent = `${time}\n${parts.join(" · ")} ${this.spec.tipUnit ?? this.spec.unit}`;
    const at = x(sample.number);
    const nodes = [svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom })];
    for (const { of, look, style } of this.spec.series) {
      const value = of(sample);
      if (value !== null && style !== "stack") nodes.push(svg("circle", { class: "dot " + look, cx: at, cy: y(value), r: 3.5 }));
    }
    return nodes;
  }

  setCursor(number) {
    this.cursor = number;
    this.draw();
  }

  pointAt(event) {
    if (!this.samples.length) return;
    const { step, newest, width } = this.scale;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const wanted = newest - Math.round((width - MARGIN.right - x) / step);
    this.setCursor(this.nearest(wanted));
  }

  nearest(number) {
    const distance = (sample) => Math.abs(sample.number - number);
    return this.samples.reduce((best, each) => (distance(each) < distance(best) ? each : best)).number;
  }

  pressed(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -WINDOW_SAMPLES, End: WINDOW_SAMPLES };
    if (event.key === "Escape" && this.cursor !== null) {
      event.preventDefault();
      this.setCursor(null);
    } else if (event.key in moves && this.samples.length) {
      event.preventDefault();
      this.setCursor(this.nearest((this.cursor ?? this.samples.at(-1).number) + moves[event.key]));
      announce(this.tip.textContent);
    }
  }
}

function axisText(value) {
  return value < 1000 ? NUMBER.format(value) : COMPACT.format(value);
}

// Stretches of neighbouring samples with a value.
function runsOf(points) {
  const runs = [];
  let open = null;
  for (const point of points) {
    if (point.value === null) {
      open = null;
    } else if (open === null) {
      open = [point];
      runs.push(open);
    } else {
      open.push(point);
    }
  }
  return runs;
}
