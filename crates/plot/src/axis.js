// The numbers along an axis: which ones, and how they are written. Nothing here knows the page, so that tests run it alone.
"use strict";
const axis = (() => {
  // The room between two labels side by side, in pixels.
  const GAP = 12;
  // The least distance of labels of a horizontal axis, in pixels.
  const LEAST = 40;
  const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  // A number alone, with so many significant digits: 0.25, 1234, 2.5e-7.
  const plain = (value, digits) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e-3 && size < 1e7) return String(Number(value.toPrecision(digits)));
    return value.toExponential(Math.max(digits - 2, 1)).replace(/\.?0*e\+?/, "e");
  };

  // A sum of tenths is not a round number.
  const rounded = (value) => Number(value.toPrecision(12));

  // The decimals that tell multiples of `step` apart.
  const decimals = (step) => Math.min(Math.max(Math.ceil(-Math.log10(step) - 1e-9), 0), 20);

  // The numbers of one axis, `step` apart, all written alike: 0.5 and 1.0, 9.5k and 10.0k, 0.5e-6 and 1.0e-6.
  const written = (values, step) => {
    const most = values.reduce((size, value) => Math.max(size, Math.abs(value)), 0);
    if (most === 0) return values.map(() => "0");
    const near = step > 0 ? step : most;
    if (most < 1e-3 || most >= 1e15) {
      const power = Math.floor(Math.log10(most) + 1e-12);
      // 10 ** power is 0 or infinite for the smallest and the largest numbers.
      const scaled = (value) => value / 10 ** Math.trunc(power / 2) / 10 ** (power - Math.trunc(power / 2));
      const places = Math.min(decimals(scaled(near)), 6);
      return values.map((value) => (value === 0 ? "0" : `${scaled(value).toFixed(places)}e${power}`));
    }
    const places = (size) => {
      if (step > 0) return decimals(step / size);
      // A number without neighbours has the digits that it takes.
      const [, digits = ""] = String(rounded(most / size)).split(".");
      return Math.min(digits.length, 6);
    };
    let [size, unit] = (most >= 1e4 && UNITS.find(([size]) => most >= size)) || [1, ""];
    // 99999 and 100001 rather than 99.999k and 100.001k.
    if (most < 1e7 && places(size) > 2) [size, unit] = [1, ""];
    return values.map((value) => (value === 0 ? "0" : (value / size).toFixed(places(size)) + unit));
  };

  // The multiples of a round number in [low, high], and that number. There are at most `most` of them, and as many as round
  // numbers allow.
  const ticks = (low, high, most) => {
    // Halves, because the difference of the largest numbers is infinite.
    const half = high / 2 - low / 2;
    if (!(half > 0) || !isFinite(half)) return { step: 0, values: [low] };
    const power = Math.floor(Math.log10(half / Math.max(most, 1))) - 1;
    for (let exponent = power; exponent <= power + 4; exponent++) {
      for (const factor of [1, 2, 5]) {
        const step = factor * 10 ** exponent;
        if (!(step > 0) || !isFinite(step)) continue;
        const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
        if (!(last - first < most)) continue;
        const values = [];
        for (let i = first; i <= last; i++) values.push(rounded(i * step) || 0);
        // Between two multiples there may be none: the beginning stands for them.
        return values.length > 0 ? { step, values } : { step: 0, values: [low] };
      }
    }
    return { step: 0, values: [low] };
  };

  // Labels of a vertical axis from `low` to `high`, at most `most`, with the value of each. `log`: the ends are powers of ten.
  const vertical = (low, high, most, { log = false, percent: share = false } = {}) => {
    // A hundred times the largest numbers is infinite, and no share.
    const percent = share && (log || (isFinite(100 * low) && isFinite(100 * high)));
    const text = (values, step) => {
      const texts = percent ? written(values.map((value) => 100 * value), 100 * step).map((each) => `${each} %`) : written(values, step);
      return values.map((value, i) => ({ value, text: texts[i] }));
    };
    if (!log || high - low < 1) {
      const { step, values } = log ? ticks(10 ** low, 10 ** high, most) : ticks(low, high, most);
      return text(values, step);
    }
    // Decades, with steps within them where there is room.
    for (const factors of [[1, 2, 5], [1]]) {
      const values = [];
      for (let power = Math.floor(low); power <= Math.ceil(high) && values.length <= 1000; power++) {
        for (const factor of factors) {
          const value = Number(`${factor}e${power}`);
          if (value > 0 && isFinite(value) && Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9) values.push(value);
        }
      }
      const every = factors.length === 1 ? Math.ceil(values.length / Math.max(most, 1)) : 1;
      if (values.length > 0 && values.length <= every * most) {
        return values.filter((_, i) => i % every === 0).map((value) => ({ value, text: percent ? `${plain(100 * value, 3)} %` : plain(value, 3) }));
      }
    }
    return text([10 ** low], 0);
  };

  // Labels of a horizontal axis from `low` to `high`, as many as there is room for: `place` is where a value is in pixels, and
  // `measure` how wide a text is. The middles of labels stay where the whole text lies between `left` and `right`.
  const horizontal = (low, high, { place, measure, left, right, whole = false }) => {
    const laid = ({ step, values }) => {
      const texts = written(values, step);
      return values.map((value, i) => {
        const width = measure(texts[i]);
        return { at: Math.min(Math.max(place(value), left + width / 2), right - width / 2), text: texts[i], width };
      });
    };
    const fits = (labels) => labels.every((label, i) => i === 0 || label.at - labels[i - 1].at >= (label.width + labels[i - 1].width) / 2 + GAP);
    for (let most = Math.max(Math.floor((right - left) / LEAST), 1); most >= 1; most--) {
      const found = ticks(low, high, most);
      const values = found.values.filter((value) => !whole || Number.isInteger(value));
      if (values.length < found.values.length && most > 1) continue;
      const labels = laid({ step: found.step, values: values.length > 0 ? values : [low] });
      if (fits(labels)) return labels;
      if (most === 1) return labels.slice(0, 1);
    }
    return [];
  };

  return { plain, written, ticks, vertical, horizontal };
})();
