// Draws the curves and shows the samples of the page's data. Text reaches the page as text only (textContent, attributes of
// SVG shapes): nothing here makes HTML of a string.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  const COLOURS = 8, DASHES = 3;
  const styleOf = (index) => `c${index % COLOURS} d${Math.floor(index / COLOURS) % DASHES}`;

  const fill = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child != null));
    return element;
  };
  const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const shape = (name, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const swatch = () => make("span", { class: "swatch" });
  const labelled = (text, control) => make("label", {}, text, control);
  const select = (options, change) => {
    const element = make("select", { change: () => change(element.value) });
    element.append(...options.map(([value, text]) => make("option", { value }, text)));
    return element;
  };

  // ---- Numbers ----

  const { plain } = axis;
  const shares = new Set(data.shares), isShare = (metric) => shares.has(metric);
  // The width of a text in pixels, in the font of charts.
  const measure = (() => {
    const pen = make("canvas").getContext("2d"), known = new Map();
    return (text) => {
      if (!known.has(text)) {
        pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
        // Digits of equal width may be a little wider.
        known.set(text, Math.ceil(pen.measureText(text).width * 1.02) + 2);
      }
      return known.get(text);
    };
  })();
  const valueText = (metric, value) => (isShare(metric) ? `${plain(100 * value, 4)} %` : plain(value, 4));

  // ---- Curves ----

  const state = { axis: "step", smoothing: 5, log: false, hidden: new Set(), filter: "" };
  const AXES = {
    step: { column: 0, title: "steps", divide: () => [1, "step"] },
    seconds: { column: 1, title: "time", divide: (most) => (most > 7200 ? [3600, "hours"] : most > 180 ? [60, "minutes"] : [1, "seconds"]) },
    tokens: { column: 2, title: "tokens", divide: () => [1, "tokens"] },
  };

  // Where a step of a phase is on the horizontal axis. Evaluations happen on GRPO's clock.
  const place = (run, phase, step) => {
    const column = AXES[state.axis].column;
    if (column === 0) return step;
    const clock = (run.phases[phase === "eval" && run.phases.grpo ? "grpo" : phase] || { clock: [] }).clock;
    if (clock.length === 0) return null;
    let low = 0, high = clock.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (clock[middle][0] < step) low = middle + 1; else high = middle;
    }
    const after = clock[Math.min(low, clock.length - 1)], before = low > 0 ? clock[low - 1] : [0, 0, 0];
    const span = after[0] - before[0];
    const share = span > 0 ? Math.min((step - before[0]) / span, 1) : 1;
    return before[column] + share * (after[column] - before[column]);
  };

  const curveOf = (index, phase, metric) => {
    const found = runs[index].phases[phase], curve = found && found.curves[metric];
    if (!curve) return null;
    const steps = found.steps[curve.at], last = steps.last || steps.first;
    const points = curve.mean.map((mean, i) => ({
      first: steps.first[i], last: last[i], mean,
      low: curve.low ? curve.low[i] : mean, high: curve.high ? curve.high[i] : mean,
      x: place(runs[index], phase, (steps.first[i] + last[i]) / 2),
    })).filter((point) => point.x != null);
    const ends = [steps.first[0], last[last.length - 1]].map((step) => place(runs[index], phase, step)).filter((x) => x != null);
    return { index, points, ends, exact: phase === "eval" || points.length <= 12, banded: Boolean(curve.low) };
  };

  // Centred moving average over a share of the curve; where there is no value there is no average.
  const smoothed = (points) => {
    const reach = Math.round((state.smoothing / 200) * points.length);
    if (reach < 1) return null;
    const sums = [0], counts = [0];
    // Sums of the largest numbers are infinite.
    const size = points.reduce((most, { mean }) => Math.max(most, Math.abs(mean ?? 0)), 0) || 1;
    for (const { mean } of points) {
      sums.push(sums[sums.length - 1] + (mean ?? 0) / size);
      counts.push(counts[counts.length - 1] + (mean == null ? 0 : 1));
    }
    return points.map(({ mean }, i) => {
      const from = Math.max(i - reach, 0), to = Math.min(i + reach + 1, points.length);
      return mean == null ? null : ((sums[to] - sums[from]) / (counts[to] - counts[from])) * size;
    });
  };

  const line = (points, x, y, value) => {
    let path = "", pen = false;
    points.forEach((point, i) => {
      const found = value(point, i);
      if (found == null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${x(point.x).toFixed(1)} ${y(found).toFixed(1)}`;
      // A value between two gaps is still seen.
      if (!pen && (i + 1 >= points.length || value(points[i + 1], i + 1) == null)) path += "h0.1";
      pen = true;
    });
    return path;
  };

  class Chart {
    constructor(phase, metric) {
      Object.assign(this, { phase, metric, dirty: true, near: false, cursor: null });
      this.plot = make("div", { class: "plot" });
      this.readout = make("div", { class: "readout" });
      this.enlarge = make("button", { type: "button", "aria-pressed": "false", "aria-label": `Enlarge ${metric}`, click: () => this.resize() }, "enlarge");
      const about = data.about[metric];
      const name = make("div", {}, make("span", { class: "name" }, metric), about ? make("div", { class: "about" }, about) : null);
      this.figure = make("figure", {}, make("div", { class: "head" }, name, this.enlarge), this.plot, this.readout);
    }

    resize() {
      const large = this.figure.classList.toggle("large");
      this.enlarge.setAttribute("aria-pressed", String(large));
      this.enlarge.textContent = large ? "shrink" : "enlarge";
      this.draw();
    }

    draw() {
      this.dirty = false;
      const width = Math.max(this.plot.clientWidth, 200), height = this.figure.classList.contains("large") ? 360 : 190;
      this.width = width;
      const curves = runs.map((_, index) => (state.hidden.has(index) ? null : curveOf(index, this.phase, this.metric)))
        .filter((curve) => curve && curve.points.some((point) => point.mean != null));
      this.curves = curves;
      if (curves.length === 0) {
        this.plot.replaceChildren(make("p", { class: "empty" }, "No finite value in the runs that are shown."));
        this.readout.replaceChildren();
        return;
      }
      const all = curves.flatMap((curve) => curve.points);
      const values = all.flatMap((point) => (point.mean == null ? [] : [point.low, point.high]));
      let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      const log = state.log && low > 0;
      const scale = log ? Math.log10 : (value) => value;
      [low, high] = [scale(low), scale(high)];
      // Halves, because the difference of the largest numbers is infinite.
      let half = high / 2 - low / 2;
      if (half === 0) half = high === 0 ? 1 : Math.abs(high) * 0.05;
      const middle = high / 2 + low / 2, floor = !log && low === 0 && high > 0;
      const share = isShare(this.metric), whole = share && !log && low >= 0 && high <= 1;
      const bottom = floor || whole ? 0 : Math.max(middle - half * 1.08, -Number.MAX_VALUE), top = whole ? 1 : Math.min(middle + half * 1.08, Number.MAX_VALUE);
      const ends = all.map((point) => point.x).concat(...curves.map((curve) => curve.ends));
      let left = ends.reduce((a, x) => Math.min(a, x), Infinity), right = ends.reduce((a, x) => Math.max(a, x), -Infinity);
      const labelled = [left, right];
      // A single place is in the middle.
      const beside = right > left ? 0 : Math.max(0.5, Math.abs(left) * 1e-6);
      [left, right] = [left - beside, right + beside];
      const margin = { left: 54, right: 12, top: 8, bottom: 32 };
      const inner = { height: height - margin.top - margin.bottom };
      const marks = axis.vertical(bottom, top, Math.floor(inner.height / 25), { log, percent: share });
      margin.left = marks.reduce((most, { text }) => Math.max(most, measure(text) + 10), margin.left);
      inner.width = width - margin.left - margin.right;
      this.x = (value) => margin.left + ((value - left) / (right - left)) * inner.width;
      this.y = (value) => {
        const share = (scale(value) / 2 - bottom / 2) / (top / 2 - bottom / 2);
        return margin.top + (1 - share) * inner.height;
      };
      const [unit, title] = AXES[state.axis].divide(right);
      const last = curves.map((curve) => `${runs[curve.index].name} ${valueText(this.metric, this.lastOf(curve))}`).join(", ");
      const svg = shape("svg", {
        viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0",
        "aria-label": `${this.metric} by ${title}. Last values: ${last}. Arrow keys move along the curve.`,
        pointermove: (event) => this.point(event), pointerdown: (event) => this.point(event),
        pointerleave: () => this.move(null), keydown: (event) => this.key(event), blur: () => this.move(null),
      });
      for (const { value, text } of marks) {
        const at = this.y(value);
        svg.append(
          shape("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: at, y2: at }),
          shape("text", { x: margin.left - 6, y: at + 4, "text-anchor": "end" }, text));
      }
      const room = { place: (value) => this.x(value * unit), measure, left: 0, right: width, whole: state.axis === "step" };
      for (const { at, text } of axis.horizontal(labelled[0] / unit, labelled[1] / unit, room)) {
        svg.append(shape("text", { x: at, y: height - 17, "text-anchor": "middle" }, text));
      }
      svg.append(shape("text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, title));
      for (const curve of curves) svg.append(this.drawn(curve));
      this.cursorShapes = shape("g");
      svg.append(this.cursorShapes);
      this.box = { top: margin.top, bottom: height - margin.bottom };
      this.plot.replaceChildren(svg);
      this.move(null);
    }

    drawn(curve) {
      const { points } = curve, { x, y } = this;
      const group = shape("g", { class: styleOf(curve.index) });
      curve.smooth = curve.exact ? null : smoothed(points);
      if (curve.banded) {
        // A stretch without gaps at a time.
        let stretch = [];
        const flush = () => {
          const upper = stretch.map((p) => `${x(p.x).toFixed(1)} ${y(p.high).toFixed(1)}`);
          const lower = stretch.map((p) => `${x(p.x).toFixed(1)} ${y(p.low).toFixed(1)}`).reverse();
          if (stretch.length > 0) group.append(shape("path", { class: "band", d: `M${upper.concat(lower).join("L")}Z` }));
          stretch = [];
        };
        points.forEach((point) => (point.mean == null ? flush() : stretch.push(point)));
        flush();
      }
      if (curve.smooth) group.append(shape("path", { class: "raw", d: line(points, x, y, (point) => point.mean) }));
      const value = curve.smooth ? (_, i) => curve.smooth[i] : (point) => point.mean;
      group.append(shape("path", { class: "mean", d: line(points, x, y, value) }));
      if (curve.exact && points.length <= 60) {
        for (const point of points) {
          if (point.mean != null) group.append(shape("circle", { class: "dot", r: 3, cx: x(point.x), cy: y(point.mean) }));
        }
      }
      return group;
    }

    lastOf(curve) {
      for (let i = curve.points.length - 1; i >= 0; i--) if (curve.points[i].mean != null) return curve.points[i].mean;
      return NaN;
    }

    point(event) {
      const box = event.currentTarget.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * this.width;
      this.move(this.places().reduce((best, x) => (best == null || Math.abs(this.x(x) - at) < Math.abs(this.x(best) - at) ? x : best), null));
    }

    places() {
      return [...new Set(this.curves.flatMap((curve) => curve.points.map((point) => point.x)))].sort((a, b) => a - b);
    }

    key(event) {
      const places = this.places(), at = this.cursor == null ? places.length - 1 : places.indexOf(this.cursor);
      const stride = event.shiftKey ? 10 : 1;
      const to = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: places.length - 1 }[event.key];
      if (to === undefined) { if (event.key === "Escape") this.move(null); return; }
      event.preventDefault();
      this.readout.setAttribute("aria-live", "polite");
      this.move(places[Math.min(Math.max(to, 0), places.length - 1)]);
    }

    // Shows the values at a place of the horizontal axis, or the last ones.
    move(at) {
      this.cursor = at;
      const marks = [], words = [];
      for (const curve of this.curves) {
        const own = at == null ? [] : curve.points.filter((point) => point.mean != null);
        const point = own.reduce((best, p) => (best == null || Math.abs(p.x - at) < Math.abs(best.x - at) ? p : best), null);
        const value = point ? point.mean : this.lastOf(curve);
        let text = valueText(this.metric, value);
        if (point && point.low !== point.high) text += ` (${valueText(this.metric, point.low)} to ${valueText(this.metric, point.high)})`;
        // Another run may have no row right here.
        if (point && Math.abs(this.x(point.x) - this.x(at)) > 6) text += ` at ${point.first}`;
        if (point) marks.push(shape("circle", { class: `dot ${styleOf(curve.index)}`, r: 4, cx: this.x(point.x), cy: this.y(value) }));
        words.push({ index: curve.index, text, point });
      }
      const here = words.find((word) => word.point && word.point.x === at);
      const steps = here && (here.point.first === here.point.last ? `step ${here.point.first}` : `steps ${here.point.first} to ${here.point.last}`);
      if (at != null) marks.unshift(shape("line", { class: "cursor", x1: this.x(at), x2: this.x(at), y1: this.box.top, y2: this.box.bottom }));
      this.cursorShapes.replaceChildren(...marks);
      this.readout.replaceChildren(make("span", {}, steps || "last"), ...words.map(({ index, text }) =>
        make("span", { class: styleOf(index) }, swatch(), runs.length > 1 && runs.length <= 4 ? `${runs[index].name} ${text}` : text)));
    }
  }

  const charts = [];
  const refresh = () => charts.forEach((chart) => { chart.dirty = true; if (chart.near) chart.draw(); });
  // Charts are drawn when they come near, and again when their room has another width.
  const near = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    const chart = charts.find((c) => c.figure === target);
    chart.near = isIntersecting;
    if (isIntersecting && chart.dirty) chart.draw();
  }), { rootMargin: "400px" });
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const chart = charts.find((c) => c.plot === target);
    if (target.clientWidth > 0 && chart.width !== undefined && chart.width !== Math.max(target.clientWidth, 200)) {
      if (chart.near) chart.draw(); else chart.dirty = true;
    }
  }));
  addEventListener("beforeprint", () => charts.forEach((chart) => { if (chart.dirty && chart.plot.clientWidth > 0) chart.draw(); }));

  const grid = (phase, metrics) => make("div", { class: "charts" }, ...metrics.map((metric) => {
    const chart = new Chart(phase, metric);
    charts.push(chart);
    near.observe(chart.figure);
    sizes.observe(chart.plot);
    return chart.figure;
  }));

  const legend = () => {
    const boxes = runs.map((run, index) => {
      const box = make("input", { type: "checkbox", checked: true, change: () => {
        if (box.checked) state.hidden.delete(index); else state.hidden.add(index);
        refresh();
      } });
      return make("label", { class: styleOf(index) }, box, swatch(), run.name);
    });
    return make("fieldset", { class: "legend", "aria-label": "Runs in the charts" }, ...boxes);
  };

  const curves = () => {
    const shown = make("span", {}, "5 %");
    const range = make("input", { type: "range", min: "0", max: "25", step: "1", value: "5", input: () => {
      state.smoothing = Number(range.value);
      shown.textContent = `${range.value} %`;
      refresh();
    } });
    const log = make("input", { type: "checkbox", change: () => { state.log = log.checked; refresh(); } });
    const sections = [];
    const filter = make("input", { type: "search", placeholder: "e.g. reward", input: () => {
      state.filter = filter.value.trim().toLowerCase();
      for (const chart of charts) chart.figure.hidden = !chart.metric.toLowerCase().includes(state.filter);
      for (const section of sections) {
        const count = [...section.querySelectorAll("figure")].filter((figure) => !figure.hidden).length;
        section.hidden = count === 0;
        if (section.tagName === "DETAILS" && state.filter !== "") section.open = count > 0;
      }
    } });
    const controls = make("div", { class: "controls" },
      labelled("horizontal axis", select(Object.entries(AXES).map(([name, { title }]) => [name, title]), (axis) => { state.axis = axis; refresh(); })),
      make("label", {}, make("span", {}, "smoothing: ", shown, " of the steps"), range),
      labelled("metrics named", filter),
      make("label", { class: "inline" }, log, "logarithmic where all values are positive"));
    const parts = data.phases.flatMap(({ name, title, first, rest }) => {
      const found = [];
      if (first.length > 0) found.push(make("div", {}, make("h3", {}, title), grid(name, first)));
      if (rest.length > 0) found.push(make("details", {}, make("summary", {}, `${title}: ${rest.length} more ${rest.length === 1 ? "metric" : "metrics"}`), grid(name, rest)));
      return found;
    });
    sections.push(...parts);
    const empty = parts.length === 0 ? [make("p", {}, "No run has rows of metrics yet.")] : [];
    document.getElementById("curve-browser").append(legend(), controls, ...parts, ...empty);
  };

  // ---- Samples ----

  const MOST_FOUND = 100;
  const signed = (value) => (value > 0 ? "+" : "") + plain(value, 4);
  const scalar = (value) => (typeof value === "number" ? plain(value, 4) : value === null ? "none" : String(value));

  const textBlock = (title, sample, name) => {
    const value = sample.fields[name];
    if (value === undefined || value === null) return null;
    const text = String(value), cut = (sample.cut || {})[name];
    const body = text === "" ? make("p", { class: "empty" }, "(empty)") : make("pre", { dir: "auto", tabindex: "0", "aria-label": title }, text);
    return make("div", {}, make("h4", {}, title), body, cut ? make("p", { class: "muted" }, `… ${cut} more characters`) : null);
  };

  const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));

  const card = (sample) => {
    const { step, fields } = sample, facts = [fact("step", step)];
    const known = new Set(["prompt", "completion", "answer", "reward", "rewards", "advantage", "truncated", "task"]);
    if (fields.task != null) facts.push(fact("task", scalar(fields.task)));
    if (fields.reward !== undefined) facts.push(fact("reward", fields.reward === null ? "none" : scalar(fields.reward)));
    if (fields.rewards && typeof fields.rewards === "object") {
      for (const [name, value] of Object.entries(fields.rewards)) facts.push(fact(`${name}`, scalar(value)));
    }
    if (typeof fields.advantage === "number") facts.push(fact("advantage", signed(fields.advantage)));
    const texts = [textBlock("Prompt", sample, "prompt"), textBlock("Completion", sample, "completion")];
    // Rows whose answer is in a column of another name have an empty text here.
    if (fields.answer !== "" && fields.answer != null) texts.push(textBlock("Right answer", sample, "answer"));
    for (const [name, value] of Object.entries(fields)) {
      if (known.has(name)) continue;
      if (typeof value === "string" && value.length > 40) texts.push(textBlock(name, sample, name));
      else facts.push(fact(name, scalar(value)));
    }
    if (fields.truncated === true) facts.push(make("span", { class: "badge" }, "cut off by the length limit"));
    return make("article", { class: "sample", "aria-label": `Sample of step ${step}` }, make("div", { class: "facts" }, ...facts), make("div", { class: "texts" }, ...texts));
  };

  const samples = () => {
    const target = document.getElementById("sample-browser");
    const having = runs.map((run, index) => [index, run]).filter(([, run]) => run.samples.length > 0);
    if (having.length === 0) {
      target.append(make("p", {}, "No run has samples: grpo train writes some every run.log_completions_steps steps."));
      return;
    }
    const view = { run: having[0][0], step: null, order: "logged", text: "" };
    const list = make("div"), note = make("p", { class: "muted", role: "status" }), left = make("p", { class: "note" });
    const name = make("div");
    const stepsOf = () => [...new Set(runs[view.run].samples.map((sample) => sample.step))];
    const stepSelect = select([], (step) => { view.step = Number(step); show(); });
    const go = (by) => {
      const steps = stepsOf(), to = steps.indexOf(view.step) + by;
      if (to >= 0 && to < steps.length) { view.step = steps[to]; stepSelect.value = view.step; show(); }
    };
    const previous = make("button", { type: "button", "aria-label": "Previous step", click: () => go(-1) }, "◀");
    const next = make("button", { type: "button", "aria-label": "Next step", click: () => go(1) }, "▶");
    const search = make("input", { type: "search", placeholder: "in all steps", input: () => { view.text = search.value.toLowerCase(); show(); } });
    const ORDERS = [["logged", "as written"], ["best", "highest reward first"], ["worst", "lowest reward first"]];
    const order = select(ORDERS, (value) => { view.order = value; show(); });
    const rewardOf = (sample) => (typeof sample.fields.reward === "number" ? sample.fields.reward : null);
    const show = () => {
      const all = runs[view.run].samples, steps = stepsOf(), searching = view.text !== "";
      const holds = (sample) => Object.values(sample.fields).some((value) => typeof value === "string" && value.toLowerCase().includes(view.text));
      let found = all.filter((sample) => (searching ? holds(sample) : sample.step === view.step));
      const total = found.length;
      // Samples without a reward come last.
      const sign = { best: -1, worst: 1 }[view.order];
      if (sign) found = [...found].sort((a, b) => sign * ((rewardOf(a) ?? sign * Infinity) - (rewardOf(b) ?? sign * Infinity)) || 0);
      found = found.slice(0, MOST_FOUND);
      previous.disabled = searching || steps.indexOf(view.step) <= 0;
      next.disabled = searching || steps.indexOf(view.step) >= steps.length - 1;
      stepSelect.disabled = searching;
      note.textContent = searching
        ? `${total} samples hold this text` + (total > MOST_FOUND ? `, the first ${MOST_FOUND} are shown` : "")
        : `step ${view.step}: ${total} samples; ${steps.length} steps have some`;
      left.textContent = runs[view.run].left_out || "";
      left.hidden = !runs[view.run].left_out;
      name.replaceChildren(make("span", { class: `run ${styleOf(view.run)}` }, swatch(), runs[view.run].name));
      list.replaceChildren(...found.map(card));
    };
    const choose = (index) => {
      view.run = Number(index);
      const steps = stepsOf();
      // Another run is shown at the same step, if it has samples there, or at the nearest.
      view.step = view.step == null ? steps[steps.length - 1] : steps.reduce((best, step) => (Math.abs(step - view.step) < Math.abs(best - view.step) ? step : best));
      stepSelect.replaceChildren(...steps.map((step) => make("option", { value: step }, String(step))));
      stepSelect.value = view.step;
      show();
    };
    const controls = make("div", { class: "controls" },
      having.length > 1 ? labelled("run", select(having.map(([index, run]) => [index, run.name]), choose)) : null,
      make("div", { class: "pair" }, previous, labelled("step", stepSelect), next),
      labelled("order", order), labelled("samples with the text", search));
    target.append(name, controls, left, note, list);
    choose(view.run);
  };

  curves();
  samples();
})();
