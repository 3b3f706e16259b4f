// Numbers as text.

const NUMBER = new Intl.NumberFormat("en-US");
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (n) => (n === null || n === undefined ? "–" : NUMBER.format(n));

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(n) >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

export function seconds(t) {
  if (t === null || t === undefined) return "–";
  if (t === 0) return "0 s";
  if (t < 0.0005) return `${Math.round(t * 1e6)} µs`;
  if (t < 0.9995) return `${t < 0.00995 ? (t * 1e3).toFixed(1) : Math.round(t * 1e3)} ms`;
  if (t < 120) return `${t.toFixed(t < 10 ? 2 : 1)} s`;
  if (t < 3570) return `${Math.round(t / 60)} min`;
  return t < 172800 ? `${Math.round(t / 3600)} h` : `${Math.round(t / 86400)} days`;
}

export const clock = (unix) => CLOCK.format(new Date(unix * 1000));
export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)}%` : "–");

export function worth(value) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : value.toPrecision(3);
}
