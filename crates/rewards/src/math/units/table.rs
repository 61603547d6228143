//! The symbols and names of units, and SI prefixes.

use super::Unit;
use std::f64::consts::PI;

/// Exponents of base units: m, kg, s, A, K, mol, cd, rad, halves of the day, currencies, and degrees of a scale of temperature.
pub(super) type Powers = [i32; 11];

pub(super) const NONE: Powers = [0; 11];
const LENGTH: Powers = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const MASS: Powers = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const TIME: Powers = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
const VOLUME: Powers = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const FORCE: Powers = [1, 1, -2, 0, 0, 0, 0, 0, 0, 0, 0];
const PRESSURE: Powers = [-1, 1, -2, 0, 0, 0, 0, 0, 0, 0, 0];
const ENERGY: Powers = [2, 1, -2, 0, 0, 0, 0, 0, 0, 0, 0];
const SPEED: Powers = [1, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0];
const ANGLE: Powers = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
const HALF_DAY: Powers = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
const MONEY: Powers = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const SCALE: Powers = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// Symbols and names, separated by spaces, with the factor and base units. Names that begin with a capital letter here are symbols: their
/// case counts.
#[rustfmt::skip]
const UNITS: &[(&str, f64, Powers)] = &[
    ("m meter metre 米", 1.0, LENGTH),
    ("g gram gramme 克", 1e-3, MASS),
    ("s sec second 秒", 1.0, TIME),
    ("A ampere amp", 1.0, [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]),
    ("K kelvin", 1.0, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
    ("mol mole", 1.0, [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]),
    ("rad radian", 1.0, ANGLE),
    ("Hz hertz", 1.0, [0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0]),
    ("N newton 牛", 1.0, FORCE),
    ("Pa pascal", 1.0, PRESSURE),
    ("J joule", 1.0, ENERGY),
    ("W watt", 1.0, [2, 1, -3, 0, 0, 0, 0, 0, 0, 0, 0]),
    ("C coulomb", 1.0, [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    ("V volt", 1.0, [2, 1, -3, -1, 0, 0, 0, 0, 0, 0, 0]),
    ("F farad", 1.0, [-2, -1, 4, 2, 0, 0, 0, 0, 0, 0, 0]),
    ("Ω Ω ohm", 1.0, [2, 1, -3, -2, 0, 0, 0, 0, 0, 0, 0]),
    ("S siemens", 1.0, [-2, -1, 3, 2, 0, 0, 0, 0, 0, 0, 0]),
    ("Wb weber", 1.0, [2, 1, -2, -1, 0, 0, 0, 0, 0, 0, 0]),
    ("T tesla", 1.0, [0, 1, -2, -1, 0, 0, 0, 0, 0, 0, 0]),
    ("H henry", 1.0, [2, 1, -2, -2, 0, 0, 0, 0, 0, 0, 0]),
    ("L l liter litre 升", 1e-3, VOLUME),
    ("eV electronvolt", 1.602_176_634e-19, ENERGY),
    ("cal calorie", 4.184, ENERGY),
    ("erg", 1e-7, ENERGY),
    ("dyn dyne", 1e-5, FORCE),
    ("bar", 1e5, PRESSURE),
    ("pc parsec", 3.085_677_6e16, LENGTH),
    ("M molar", 1e3, [-3, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]),
    ("cd candela", 1.0, [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]),
    ("Gy gray", 1.0, [2, 0, -2, 0, 0, 0, 0, 0, 0, 0, 0]),
    ("Bq becquerel", 1.0, [0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0]),
];

/// Like [`UNITS`], without SI prefixes.
#[rustfmt::skip]
const BARE_UNITS: &[(&str, f64, Powers)] = &[
    ("Å Å angstrom ångström", 1e-10, LENGTH),
    ("atm atmosphere", 101_325.0, PRESSURE),
    ("torr Torr mmHg", 133.322_37, PRESSURE),
    ("psi", 6894.757, PRESSURE),
    ("u amu Da", 1.660_539e-27, MASS),
    ("t tonne 吨", 1e3, MASS),
    ("公斤", 1.0, MASS),
    ("斤", 0.5, MASS),
    ("lb pound", 0.453_592_37, MASS),
    ("oz ounce", 0.028_349_5, MASS),
    ("公里", 1e3, LENGTH),
    ("in inch inche", 0.0254, LENGTH),
    ("ft foot feet", 0.3048, LENGTH),
    ("yd yard", 0.9144, LENGTH),
    ("mi mile", 1609.344, LENGTH),
    ("ly", 9.4607e15, LENGTH),
    ("AU", 1.495_98e11, LENGTH),
    ("gal gallon", 3.785_41e-3, VOLUME),
    ("min minute 分钟", 60.0, TIME),
    ("h hr hour 小时", 3600.0, TIME),
    ("d day 天", 86_400.0, TIME),
    ("week 周", 604_800.0, TIME),
    ("month 个月", 2_629_800.0, TIME),
    ("yr year 年", 31_557_600.0, TIME),
    ("mph", 0.44704, SPEED),
    ("kmh kph", 0.277_777_8, SPEED),
    ("rev revolution 转", 2.0 * PI, ANGLE),
    ("rpm", 2.0 * PI / 60.0, [0, 0, -1, 0, 0, 0, 0, 1, 0, 0, 0]),
    ("° deg degree 度", PI / 180.0, ANGLE),
    ("arcmin arcminute", PI / 10_800.0, ANGLE),
    ("arcsec arcsecond", PI / 648_000.0, ANGLE),
    ("°C celsius 摄氏度", 1.0, SCALE),
    ("°F fahrenheit 华氏度", 5.0 / 9.0, SCALE),
    ("dB decibel", 1.0, NONE),
    ("D debye", 3.335_64e-30, [1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    ("M☉", 1.988_41e30, MASS),
    ("R☉", 6.957e8, LENGTH),
    ("L☉", 3.828e26, [2, 1, -3, 0, 0, 0, 0, 0, 0, 0, 0]),
    ("M⊕", 5.972e24, MASS),
    ("R⊕", 6.371e6, LENGTH),
    // The factors of currencies only tell them apart.
    ("$ dollar buck", 1.0, MONEY),
    ("USD US$ 美元", 1.5, MONEY),
    ("CAD CA$ C$", 16.0, MONEY),
    ("AUD A$ AU$", 17.0, MONEY),
    ("HKD HK$", 18.0, MONEY),
    ("SGD S$", 19.0, MONEY),
    ("TWD NT$", 20.0, MONEY),
    ("BRL R$ reais", 21.0, MONEY),
    ("₿ BTC bitcoin", 22.0, MONEY),
    ("₦ NGN naira", 23.0, MONEY),
    ("₴ UAH hryvnia", 24.0, MONEY),
    ("৳ BDT taka", 25.0, MONEY),
    ("¢ cent", 0.01, MONEY),
    ("€ EUR euro 欧元", 2.0, MONEY),
    ("£ GBP sterling 英镑", 3.0, MONEY),
    ("¥", 4.0, MONEY),
    ("JPY yen 日元", 5.0, MONEY),
    ("CNY RMB yuan 元 块", 6.0, MONEY),
    ("角", 0.6, MONEY),
    ("₹ INR Rs rupee 卢比", 7.0, MONEY),
    ("₩ KRW 韩元", 8.0, MONEY),
    ("₽ RUB ruble rouble 卢布", 9.0, MONEY),
    ("CHF franc", 10.0, MONEY),
    ("₱ MXN peso", 11.0, MONEY),
    ("₺ TRY lira", 12.0, MONEY),
    ("₪ ILS shekel", 13.0, MONEY),
    ("฿ THB baht", 14.0, MONEY),
    ("₫ VND dong", 15.0, MONEY),
    ("am AM", 1.0, HALF_DAY),
    ("pm PM", 2.0, HALF_DAY),
];

/// SI prefixes by symbol, by name, and in Chinese.
pub(super) const PREFIXES: &[(&str, f64)] = &[
    ("f", 1e-15),
    ("femto", 1e-15),
    ("p", 1e-12),
    ("pico", 1e-12),
    ("n", 1e-9),
    ("nano", 1e-9),
    ("纳", 1e-9),
    ("µ", 1e-6),
    ("μ", 1e-6),
    ("micro", 1e-6),
    ("微", 1e-6),
    ("m", 1e-3),
    ("milli", 1e-3),
    ("毫", 1e-3),
    ("c", 1e-2),
    ("centi", 1e-2),
    ("厘", 1e-2),
    ("d", 1e-1),
    ("deci", 1e-1),
    ("分", 1e-1),
    ("h", 1e2),
    ("hecto", 1e2),
    ("k", 1e3),
    ("kilo", 1e3),
    ("千", 1e3),
    ("M", 1e6),
    ("mega", 1e6),
    ("兆", 1e6),
    ("G", 1e9),
    ("giga", 1e9),
    ("T", 1e12),
    ("tera", 1e12),
];

/// Units that one symbol or name may mean: `¥` is yen or yuan, `pounds` are a currency or a mass, `$` is any dollar.
pub(super) const AMBIGUOUS: &[(&str, &str)] = &[
    ("¥", "yen"),
    ("¥", "yuan"),
    ("pound", "£"),
    ("$", "USD"),
    ("$", "CAD"),
    ("$", "AUD"),
    ("$", "HKD"),
    ("$", "SGD"),
    ("$", "TWD"),
    // One and two strokes behind a number.
    ("arcmin", "ft"),
    ("arcmin", "min"),
    ("arcsec", "inch"),
    ("arcsec", "s"),
];

/// Letters that are units only inside of `\text{}` or `\mathrm{}`, and a word that is a preposition outside of it.
const ONLY_IN_TEXT: &[&str] = &["u", "t", "d", "in", "l"];

/// Returns the unit with a symbol or name, such as `kJ`, `kilojoules` or `厘米`; in `\text{}` also two symbols without a space, as `Jmol`.
pub(super) fn named(word: &str, is_text: bool) -> Option<Unit> {
    if word.is_empty() || !is_text && ONLY_IN_TEXT.contains(&word) {
        return None;
    }
    let is_certain = is_text || word.chars().nth(1).is_some() || !word.is_ascii();
    let find = |word: &str| {
        let bare = || lookup(BARE_UNITS, word).or_else(|| lookup(UNITS, word));
        let prefixed = || {
            PREFIXES.iter().find_map(|(prefix, factor)| {
                let (scale, powers) = lookup(UNITS, word.strip_prefix(prefix)?)?;
                Some((scale * factor, powers))
            })
        };
        let (factor, powers) = bare().or_else(prefixed)?;
        Some(Unit { factor, powers, is_certain })
    };
    let joined = || {
        let ends = word.char_indices().map(|(i, _)| i).skip(1).filter(|_| is_text);
        ends.filter_map(|end| Some(find(&word[..end])?.times(find(&word[end..])?, 1))).next()
    };
    find(word).or_else(joined)
}

/// Returns the factor and the base units of a symbol, or of a name in lower case or with a capital, singular or plural.
fn lookup(units: &[(&str, f64, Powers)], word: &str) -> Option<(f64, Powers)> {
    let lower = word.to_lowercase();
    let name = lower.strip_suffix('s').filter(|name| name.len() > 1).unwrap_or(&lower);
    let is_name =
        |known: &&str| *known == word || known.len() > 2 && known.is_ascii() && (**known == *name || **known == *lower);
    units
        .iter()
        .find(|(names, ..)| names.split(' ').any(|known| is_name(&known)))
        .map(|(_, factor, powers)| (*factor, *powers))
}
