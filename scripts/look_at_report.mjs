// Opens a page of `grpo report` in a headless browser at the widths of phone and desktop, in light and dark mode, operates its
// controls, and saves screenshots. Fails on errors and warnings of the page's script, on network requests, and if
// the page is wider than the screen or labels of a chart overlap or are cut off.
//
//   mkdir browser && cd browser && npm install puppeteer-core @sparticuz/chromium
//   node REPOSITORY/scripts/look_at_report.mjs PAGE.html FOLDER
//
// The packages are read from the current folder. @sparticuz/chromium has Chromium in its package (Linux, x86-64); with
// CHROME=/usr/bin/chromium an installed browser is used and puppeteer-core is enough.
import { createRequire } from "node:module";
import { mkdirSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [page, folder] = process.argv.slice(2);
if (!folder) {
  console.error("usage: node look_at_report.mjs PAGE.html FOLDER");
  process.exit(2);
}
const { resolve: find } = createRequire(join(process.cwd(), "package.json"));
const load = async (name) => (await import(pathToFileURL(find(name)))).default;
const puppeteer = await load("puppeteer-core"), installed = process.env.CHROME;
const chromium = installed ? null : await load("@sparticuz/chromium");
const browser = await puppeteer.launch({
  args: [...(chromium?.args ?? []), "--no-sandbox"], executablePath: installed ?? (await chromium.executablePath()),
  headless: installed ? true : "shell",
});
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const problems = [];
mkdirSync(folder, { recursive: true });

// The labels of charts that overlap or are cut off.
const misplaced = () => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
  const name = svg.getAttribute("aria-label").split(" ")[0], chart = svg.getBoundingClientRect();
  const labels = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return labels.flatMap(([text, box], i) => {
    const cut = box.left < chart.left - 0.5 || box.right > chart.right + 0.5 || box.top < chart.top - 0.5 || box.bottom > chart.bottom + 0.5;
    // The box of a line is two pixels higher than its letters.
    const covered = labels.slice(i + 1).filter(([, other]) =>
      box.left < other.right && other.left < box.right && box.top < other.bottom - 2 && other.top < box.bottom - 2);
    return [...(cut ? [`${name}: ${text} is cut off`] : []), ...covered.map(([other]) => `${name}: ${text} and ${other} overlap`)];
  });
});

for (const width of [360, 390, 1280]) {
  for (const scheme of ["light", "dark"]) {
    const phone = width < 500, name = `${width}-${scheme}`;
    const tab = await browser.newPage();
    const problem = (what) => problems.push(`${name}: ${what}`);
    tab.on("console", (message) => problem(message.text()));
    tab.on("pageerror", (error) => problem(error.message));
    tab.on("dialog", (dialog) => { problem(`a dialog: ${dialog.message()}`); dialog.dismiss(); });
    tab.on("request", (request) => { if (!request.url().startsWith("file:")) problem(`loads ${request.url()}`); });
    await tab.setViewport({ width, height: phone ? 780 : 900, isMobile: phone, hasTouch: phone });
    await tab.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    await tab.goto(pathToFileURL(resolve(page)).href);

    for (const section of ["summary", "curves", "evaluations", "samples", "time", "configuration", "metrics"]) {
      await tab.evaluate((id) => document.getElementById(id).scrollIntoView(), section);
      await wait(250);
      await tab.screenshot({ path: join(folder, `${name}-${section}.png`) });
    }
    // Charts are drawn when they are near.
    const draw = () => tab.evaluate(async () => {
      for (let y = 0; y < document.body.scrollHeight; y += 600) {
        scrollTo(0, y);
        await new Promise((done) => setTimeout(done, 40));
      }
    });
    // Every control once: axes, checkboxes, ranges, orders, buttons, what is folded.
    await tab.evaluate(() => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
    await draw();
    for (const axis of ["step", "seconds", "tokens"]) {
      await tab.evaluate((axis) => {
        const select = document.querySelector("#curves select");
        select.value = axis;
        select.dispatchEvent(new Event("change"));
      }, axis);
      await draw();
      (await tab.evaluate(misplaced)).forEach((label) => problem(`by ${axis}, ${label}`));
    }
    await tab.evaluate(async () => {
      const pause = () => new Promise((done) => setTimeout(done, 30));
      const change = async (element, value, event) => { element.value = value; element.dispatchEvent(new Event(event)); await pause(); };
      for (const select of document.querySelectorAll("select")) {
        for (const option of [...select.options].slice(0, 20)) await change(select, option.value, "change");
      }
      for (const range of document.querySelectorAll("input[type=range]")) {
        for (const value of [range.min, range.max]) await change(range, value, "input");
      }
      for (const search of document.querySelectorAll("input[type=search]")) {
        for (const value of ["e", "no such text", ""]) await change(search, value, "input");
      }
      for (const box of document.querySelectorAll("input[type=checkbox], button")) { box.click(); await pause(); }
      for (const box of document.querySelectorAll("input[type=checkbox]")) { box.click(); await pause(); }
      for (const svg of [...document.querySelectorAll("figure svg")].slice(0, 5)) {
        svg.focus();
        for (const key of ["Home", "ArrowRight", "End", "Escape"]) svg.dispatchEvent(new KeyboardEvent("keydown", { key }));
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: 100, clientY: 100 }));
      }
    });
    const found = await tab.evaluate(() => ({
      width: document.documentElement.scrollWidth, screen: innerWidth,
      nameless: [...document.querySelectorAll("input, select, button")]
        .filter((e) => !e.labels?.length && !e.getAttribute("aria-label") && !e.textContent.trim()).length,
      broken: [...document.querySelectorAll("path")].filter((p) => /NaN|Infinity/.test(p.getAttribute("d"))).length,
    }));
    if (found.width > found.screen) problem(`it is ${found.width} wide on a screen of ${found.screen}`);
    if (found.nameless > 0) problem(`${found.nameless} controls have no name`);
    if (found.broken > 0) problem(`${found.broken} curves leave the chart`);
    await tab.close();
  }
}
await browser.close();
problems.forEach((problem) => console.error(problem));
console.log(problems.length === 0 ? `no problem; screenshots are in ${folder}` : `${problems.length} problems`);
process.exit(problems.length === 0 ? 0 : 1);
