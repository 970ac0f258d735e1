// Figures, drawn as SVG from what a `Panel` describes: at the width of their place, in the colours of the page.
const shapes = ["M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", "M-.9-.9H.9V.9H-.9z", "M0-1.3L1.3 0L0 1.3L-1.3 0z", "M0-1.2L1.15.9H-1.15z",
  "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4z", "M-1.15-.6L-.6-1.15L0-.55L.6-1.15L1.15-.6L.55 0L1.15.6L.6 1.15L0 .55L-.6 1.15L-1.15.6L-.55 0z",
  "M0-1.4L.4-.45L1.35-.43L.6.17L.85 1.13L0 .58L-.85 1.13L-.6.17L-1.35-.43L-.4-.45z", "M0-1.2L1.15-.37L.7.97H-.7L-1.15-.37z"];
const scales = {rising: ["#F4F7FB", "#BCD3EA", "#6FA3D3", "#2A6CA8", "#08306B"], diverging: ["#2166AC", "#92C5DE", "#F7F7F7", "#F4A582", "#B2182B"]};
const pen = document.createElement("canvas").getContext("2d");

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}
function widthOf(text, size) {
  pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}
function cut(text, room, size) {
  if (widthOf(text, size) <= room) return text;
  let length = text.length - 1;
  while (length > 1 && widthOf(`${text.slice(0, length)}…`, size) > room) length--;
  return `${text.slice(0, length)}…`;
}
function short(value) {
  for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= (unit === "k" ? 1e4 : scale)) return `${+(value / (unit === "k" ? 1e3 : scale)).toPrecision(4)}${unit}`;
  }
  return `${+value.toPrecision(4)}`;
}
// an axis: where a value lies between 0 and 1, and its ticks
function axisOf(axis, values, most, rows) {
  if (rows) return {at: (name) => (rows.indexOf(name) + 0.5) / rows.length, ticks: rows.map((name) => [name, name])};
  const finite = values.filter((value) => Number.isFinite(value) && !(axis.log && value <= 0));
  const turn = axis.log ? Math.log10 : (value) => value;
  let [low, high] = axis.bounds || [Math.min(...finite), Math.max(...finite)];
  if (axis.from_zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (!finite.length && !axis.bounds) [low, high] = [axis.log ? 0.1 : 0, 1];
  [low, high] = [turn(low), turn(high)];
  if (!(high > low)) [low, high] = [low - (Math.abs(low) * 0.05 || 0.5), high + (Math.abs(high) * 0.05 || 0.5)];
  if (!axis.bounds) {
    const margin = 0.05 * (high - low);
    [low, high] = [axis.from_zero && low === 0 ? low : low - margin, high + margin];
  }
  let ticks = Object.entries(axis.ticks || {}).map(([value, text]) => [Number(value), text]).sort((a, b) => a[0] - b[0]);
  const decades = axis.log ? high - low : 0;
  if (!axis.ticks && decades > 0.5) {
    for (let power = Math.floor(low); power <= high; power++) {
      for (const digit of decades < 1.2 ? [1, 1.5, 2, 3, 5, 7] : decades < 3 ? [1, 2, 5] : [1]) ticks.push(digit * 10 ** power);
    }
    ticks = ticks.map((value) => [value, Math.abs(Math.log10(value)) > 4 ? value.toExponential() : short(value)]);
  } else if (!axis.ticks) {
    const [from, to] = axis.log ? [10 ** low, 10 ** high] : [low, high], rough = (to - from) / most, size = 10 ** Math.floor(Math.log10(rough));
    const step = size * [1, 2, 5, 10].find((factor) => size * factor >= rough * 0.999);
    for (let n = Math.ceil(from / step - 1e-9); n * step <= to + 1e-9 * step; n++) ticks.push([n * step, short(+(n * step).toPrecision(12))]);
  }
  const at = (value) => (turn(value) - low) / (high - low);
  return {at, ticks: ticks.filter(([value]) => at(value) > -1e-6 && at(value) < 1 + 1e-6)};
}
// as many of the labels as do not touch, the first among them
function thinned(labels, size) {
  let end = -Infinity;
  return labels.filter(([place, text]) => {
    const half = widthOf(text, size) / 2;
    if (place - half < end + 8) return false;
    end = place + half;
    return true;
  });
}
function spread(places, gap, low, high) {
  const order = places.map((_, i) => i).sort((a, b) => places[a] - places[b]), moved = [...places];
  order.forEach((i, n) => { if (n) moved[i] = Math.max(moved[i], moved[order[n - 1]] + gap); });
  for (let n = order.length - 1, top = high; n >= 0; n--, top = moved[order[n + 1]] - gap) moved[order[n]] = Math.min(moved[order[n]], top);
  return moved.map((place) => Math.max(place, low));
}
function colorOf(scale, share) {
  const place = Math.min(Math.max(share, 0), 1) * (scale.length - 1), i = Math.min(Math.floor(place), scale.length - 2);
  return [1, 3, 5].map((at) => {
    const [a, b] = [scale[i], scale[i + 1]].map((color) => parseInt(color.slice(at, at + 2), 16));
    return Math.round(a + (place - i) * (b - a));
  });
}
// a tooltip with the text of what is nearest to the pointer
function addTooltip(place, svg, nearest) {
  const tooltip = document.createElement("div"), ring = element("circle", {r: 7, class: "ring", visibility: "hidden"}, svg);
  tooltip.className = "tooltip";
  tooltip.hidden = true;
  place.append(tooltip);
  const hide = () => { tooltip.hidden = true; ring.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect(), spot = nearest(event.clientX - frame.left, event.clientY - frame.top);
    if (!spot) return hide();
    tooltip.textContent = spot.text;
    tooltip.hidden = false;
    tooltip.style.left = `${Math.max(0, Math.min(spot.x + 12, place.clientWidth - tooltip.offsetWidth))}px`;
    tooltip.style.top = `${spot.y > tooltip.offsetHeight + 12 ? spot.y - tooltip.offsetHeight - 10 : spot.y + 14}px`;
    ring.setAttribute("visibility", spot.ring ? "visible" : "hidden");
    ring.setAttribute("transform", `translate(${spot.x} ${spot.y})`);
  });
  svg.addEventListener("pointerleave", hide);
}
function drawPanel(place, off, shade, alone) {
  const panel = JSON.parse(place.dataset.figure), width = place.clientWidth, narrow = width < 560, size = narrow ? 12 : 13;
  const height = printing ? Math.min(place.dataset.height, 340) : narrow ? Math.min(place.dataset.height, 360) : Number(place.dataset.height);
  place.replaceChildren();
  if (width < 60) return;
  const svg = element("svg", {width, height, viewBox: `0 0 ${width} ${height}`, "font-size": size, "aria-hidden": "true"}, place);
  const heat = panel.shown.find((one) => one.values);
  if (heat) return drawHeatMap(place, svg, heat, panel, width, height, size);
  const series = panel.shown.filter((one) => !off.has(one.name)), lines = series.filter((one) => one.mode !== "points");
  const named = panel.shown.filter((one, i) => one.legend && panel.shown.findIndex((other) => other.legend && other.name === one.name) === i);
  const rows = panel.y.rows ? [...new Set(series.flatMap((one) => one.y))] : null;
  const fits = named.length * (size + 3) < height - 72;  // one name below the other, beside the ends of lines
  const ends = !narrow && !alone && named.length && fits && panel.shown.every((one) => one.mode === "points" || !one.legend || one.label);
  const labelled = ends ? lines.filter((one) => one.label && one.x.length) : [];
  const guided = panel.guides.filter((guide) => guide.text && guide.y !== null);
  const y = axisOf(panel.y, [...series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]), ...panel.guides.flatMap((g) => g.y ?? [])], height / 60, rows);
  const x = axisOf(panel.x, [...series.flatMap((one) => one.x), ...panel.guides.flatMap((g) => g.x ?? [])], width / 90);
  const side = Math.min(Math.max(...y.ticks.map(([, text]) => widthOf(text, size)), 8) + 10, 0.38 * width);
  const right = labelled.length ? Math.max(...labelled.map((one) => widthOf(one.label, size))) + 22 : 14;
  const box = {left: side, right: width - right, top: panel.y.title ? 26 : 10, bottom: height - (panel.x.title ? 46 : 24)};
  const px = (value) => box.left + x.at(value) * (box.right - box.left);
  const py = (value) => (rows ? box.top + y.at(value) * (box.bottom - box.top) : box.bottom - y.at(value) * (box.bottom - box.top));
  const text = (words, attributes) => element("text", {fill: "currentColor", ...attributes}, svg, words);
  if (panel.y.title) text(cut(panel.y.title, width, size), {x: 0, y: 13, class: "soft"});
  if (panel.x.title) text(cut(panel.x.title, box.right - box.left + Math.min(side, 40), size), {x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle", class: "soft"});
  for (const [value, label] of y.ticks) {
    element("line", {x1: box.left, x2: box.right, y1: py(value), y2: py(value), class: "grid"}, svg);
    const tick = text(cut(label, side - 8, size), {x: box.left - 8, y: py(value), dy: ".35em", "text-anchor": "end"});
    if (rows) element("title", {}, tick, label);
  }
  for (const [at, label] of thinned(x.ticks.map(([value, label]) => [px(value), label]), size)) {
    element("line", {x1: at, x2: at, y1: box.top, y2: box.bottom, class: "grid"}, svg);
    text(label, {x: Math.min(at, width - widthOf(label, size) / 2), y: box.bottom + 17, "text-anchor": "middle"});
  }
  // a picture in the picture: it cuts what lies outside
  const frame = {x: box.left - 6, y: box.top - 6, width: box.right - box.left + 12, height: box.bottom - box.top + 12};
  const plot = element("svg", {...frame, viewBox: `${frame.x} ${frame.y} ${frame.width} ${frame.height}`}, svg), spots = [];
  for (const guide of panel.guides) {
    const [low, high] = panel.x.bounds || [0, 1], across = guide.y !== null, down = guide.x !== null;
    const from = across ? [box.left, py(guide.y)] : down ? [px(guide.x), box.top] : [px(low), py(low)];
    const to = across ? [box.right, py(guide.y)] : down ? [px(guide.x), box.bottom] : [px(high), py(high)];
    element("line", {x1: from[0], y1: from[1], x2: to[0], y2: to[1], class: "guide"}, plot);
    if (across && guide.text) text(guide.text, {x: box.right - 4, y: Math.max(py(guide.y) - 6, box.top + size), "text-anchor": "end", class: "guide"});
    const left = down && px(guide.x) - box.left > widthOf(guide.text, size) + 8;
    if (!across && down && guide.text) text(guide.text, {x: px(guide.x) + (left ? -5 : 5), y: box.top + size, "text-anchor": left ? "end" : "start", class: "guide"});
  }
  for (const one of series) {
    const color = shade(one.color), group = element("g", {class: "series", "data-name": one.name, opacity: one.opacity}, plot);
    const at = one.x.map((value, i) => [px(value), py(one.y[i])]);
    const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
    if (one.high && one.mode !== "points") {
      const band = [...one.x.map((value, i) => [px(value), py(one.high[i])]), ...one.x.map((value, i) => [px(value), py(one.low[i])]).reverse()];
      element("path", {d: `${path(band)}z`, fill: color, opacity: 0.15}, group);
    } else if (one.high) {
      at.forEach(([a], i) => element("path", {d: `M${a} ${py(one.low[i])}V${py(one.high[i])}`, stroke: color, "stroke-width": 1.4}, group));
    }
    if (one.mode === "steps") element("path", {d: at.map(([a, b], i) => (i ? `H${a}V${b}` : `M${a} ${b}`)).join(""), fill: "none", stroke: color, "stroke-width": 1.2}, group);
    else if (one.mode !== "points" && at.length) element("path", {d: path(at), fill: "none", stroke: color, "stroke-width": 2, "stroke-linejoin": "round"}, group);
    at.forEach(([a, b], i) => {
      if (one.mode === "line" || one.mode === "points") drawMarker(group, one, color, a, b);
      const words = typeof one.texts === "string" ? one.texts : one.texts[i];
      if (one.mode !== "steps" && b > box.top - 8 && b < box.bottom + 8) spots.push({x: a, y: b, ring: true, text: words || `${one.name}\n${short(one.x[i])}: ${typeof one.y[i] === "number" ? one.y[i].toFixed(4) : one.y[i]}`});
    });
  }
  const wanted = spread(labelled.map((one) => Math.min(Math.max(py(one.y[one.y.length - 1]), box.top), box.bottom)), size + 3, box.top, box.bottom);
  labelled.forEach((one, i) => {
    const last = one.x.length - 1, a = px(one.x[last]);
    element("path", {d: `M${a + 5} ${py(one.y[last])}L${box.right + 10} ${wanted[i]}`, stroke: shade(one.color), opacity: 0.5, fill: "none"}, svg);
    text(one.label, {x: box.right + 13, y: wanted[i], dy: ".35em", style: `fill: ${shade(one.color)}`});
  });
  addTooltip(place, svg, (a, b) => {
    const away = (spot) => Math.hypot(spot.x - a, spot.y - b), spot = spots.reduce((best, one) => (best && away(best) <= away(one) ? best : one), null);
    return spot && away(spot) < 36 ? spot : null;
  });
  if (panel.legend && named.length > 1 && !alone && !labelled.length) drawLegend(place, named.filter((one) => !off.has(one.name)), shade);
}
function drawMarker(parent, one, color, a, b) {
  const look = one.hollow ? {fill: "none", stroke: color, "stroke-width": 1.6} : {fill: color};
  element("path", {d: shapes[one.number % shapes.length], transform: `translate(${a.toFixed(1)} ${b.toFixed(1)}) scale(${0.5 * one.size})`, "vector-effect": "non-scaling-stroke", ...look}, parent);
}
function drawLegend(place, named, shade) {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const one of named) {
    const item = document.createElement("li"), mark = element("svg", {width: 26, height: 12}, item), color = shade(one.color);
    if (one.mode !== "points") element("path", {d: "M1 6H25", stroke: color, "stroke-width": 2}, mark);
    if (one.mode === "line" || one.mode === "points") drawMarker(mark, {...one, size: Math.min(one.size + 2, 10)}, color, 13, 6);
    item.append(` ${one.label || one.name}`);
    list.append(item);
  }
  place.append(list);
}
function drawHeatMap(place, svg, heat, panel, width, height, size) {
  const small = size - 1, [low, high] = heat.bounds, wide = heat.x.length, tall = heat.y.length;
  const side = Math.min(Math.max(...heat.y.map((name) => widthOf(name, small)), 8) + 8, 0.34 * width);
  const box = {left: side, right: width - 4, top: 34, bottom: height - (panel.x.title ? 42 : 24)};
  const across = (box.right - box.left) / wide, down = (box.bottom - box.top) / tall, share = (value) => (value - low) / (high - low || 1);
  const turned = !heat.diverging && dark.matches && !printing, scale = heat.diverging ? scales.diverging : turned ? [...scales.rising].reverse() : scales.rising;
  const cells = document.createElement("canvas");
  [cells.width, cells.height] = [wide, tall];
  const image = cells.getContext("2d"), pixels = image.createImageData(wide, tall);
  heat.values.forEach((row, r) => row.forEach((value, c) => {
    if (value !== null) pixels.data.set([...colorOf(scale, share(value)), 255], 4 * (r * wide + c));
  }));
  image.putImageData(pixels, 0, 0);
  element("image", {href: cells.toDataURL(), x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, preserveAspectRatio: "none", style: "image-rendering: pixelated"}, element("g", {class: "series"}, svg));
  const text = (words, attributes) => element("text", {fill: "currentColor", "font-size": small, ...attributes}, svg, words);
  const step = Math.max(1, Math.ceil((small + 2) / down));
  heat.y.forEach((name, r) => { if (r % step === 0) text(cut(name, side - 6, small), {x: side - 6, y: box.top + (r + 0.5) * down, dy: ".35em", "text-anchor": "end"}); });
  for (const [at, name] of thinned(heat.x.map((name, c) => [box.left + (c + 0.5) * across, name]), small)) text(name, {x: Math.min(at, width - widthOf(name, small) / 2), y: box.bottom + 15, "text-anchor": "middle"});
  if (panel.x.title) text(panel.x.title, {x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle", class: "soft"});
  const ends = [`${heat.what}  ${short(low)}`, short(high)], from = box.left + widthOf(ends[0], small) + 8;
  scale.forEach((color, i) => element("rect", {x: from + i * 18, y: 8, width: 18, height: 10, fill: color}, svg));
  text(ends[0], {x: box.left, y: 17, class: "soft"});
  text(ends[1], {x: from + scale.length * 18 + 6, y: 17, class: "soft"});
  addTooltip(place, svg, (a, b) => {
    const c = Math.floor((a - box.left) / across), r = Math.floor((b - box.top) / down), value = heat.values[r]?.[c];
    return value === undefined ? null : {x: a, y: b, text: `${heat.y[r]}\n${heat.x[c]}: ${value === null ? "–" : value.toFixed(3)}`};
  });
}
