//! Attention, with and without caches.

use super::*;
use std::ops::Range;

/// Windows of one row, of fewer and of more rows than a tile, and none, with and without a scale.
const SCORES: [Scores; 4] = [
    Scores { scale: None, window: None },
    Scores { scale: Some(0.7), window: Some(1) },
    Scores { scale: None, window: Some(4) },
    Scores { scale: Some(0.3), window: Some(66) },
];

/// Attention by its definition, in f64.
fn plain_attention(qkv: &[f64], heads: Heads, scores: Scores, spans: &[Span]) -> Vec<f64> {
    let (d, row) = (heads.width, heads.row());
    let mut out = Vec::new();
    for span in spans {
        for query in span.rows.clone() {
            let keys: Vec<usize> = span.prefix.clone().chain(span.rows.start..=query).collect();
            let keys = &keys[scores.window.map_or(0, |window| keys.len().saturating_sub(window))..];
            let scale = scores.scale.map_or(1.0 / (d as f64).sqrt(), f64::from);
            for a in 0..heads.query {
                let k = a / heads.per_key_head();
                let at = |row_of: usize, columns: std::ops::Range<usize>| &qkv[row_of * row..][columns];
                let score = |key: &usize| {
                    let (q, k) = (at(query, heads.queries(a)), at(*key, heads.keys(k)));
                    (q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scale).exp()
                };
                let weights: Vec<f64> = keys.iter().map(score).collect();
                let total: f64 = weights.iter().sum();
                out.extend((0..d).map(|i| {
                    keys.iter().zip(&weights).map(|(key, w)| w / total * at(*key, heads.values(k))[i]).sum::<f64>()
                }));
            }
        }
    }
    out
}

/// The rows and the prefix of each span, and the number of rows.
type Rows<'a> = (&'a [(Range<usize>, Range<usize>)], usize);

/// Two prompts, one with three completions, one of them empty.
const SMALL: Rows<'_> = (&[(0..5, 0..0), (5..8, 0..5), (8..8, 0..5), (8..10, 0..5), (10..13, 0..0)], 13);
/// A span of a full tile of 60 rows and a part of one, with a prefix.
const LARGE: Rows<'_> = (&[(0..4, 0..0), (4..72, 0..4)], 72);

#[test]
fn attention_and_its_gradient_match_the_formulas() {
    assert_formulas([(SMALL, SCORES[0]), (SMALL, SCORES[1]), (SMALL, SCORES[2]), (LARGE, SCORES[3])]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn attention_of_several_tiles_and_its_gradient_match_the_formulas() {
    assert_formulas([(LARGE, SCORES[0]), (LARGE, SCORES[2])]);
}

fn assert_formulas<const CASES: usize>(cases: [(Rows<'_>, Scores); CASES]) {
    for ((of, n), scores) in cases {
        let spans = &spans(of);
        let (qkv, dout) = (noise(n * HEADS.row(), 1), noise(n * 24, 2));
        let expected = plain_attention(&wide(&qkv), HEADS, scores, spans);
        let gradient = differences(&qkv, &dout, |qkv| plain_attention(qkv, HEADS, scores, spans));
        for layers in all_layers() {
            let mixed = layers.attention(&qkv, HEADS, scores, spans).unwrap();
            assert_close(&mixed.values, &expected, 1e-6);
            let of = AttentionGrad { qkv: &qkv, values: &mixed.values, lse: &mixed.lse, dvalues: &dout };
            assert_close(&layers.attention_grad(of, HEADS, scores, spans).unwrap(), &gradient, 1e-5);
        }
    }
}

#[test]
fn a_nan_key_affects_only_queries_that_attend_to_it() {
    let spans = spans(&[(0..4, 0..0), (4..6, 0..4), (6..9, 0..0)]);
    for layers in all_layers() {
        let mut qkv = noise(9 * HEADS.row(), 1);
        // A key of the last token of the prompt.
        qkv[3 * HEADS.row() + HEADS.keys(0).start] = f32::NAN;
        let values = layers.attention(&qkv, HEADS, Scores::default(), &spans).unwrap().values;
        let seen: Vec<bool> = values.chunks_exact(24).map(|row| row.iter().any(|x| x.is_nan())).collect();
        assert_eq!(seen, [false, false, false, true, true, true, false, false, false]);
    }
}

#[test]
fn attention_with_a_long_cache_matches_attention_over_all_rows() {
    // The groups of key heads are several tasks, and their query heads two blocks of rows.
    const HEADS: Heads = Heads { query: 22, key_value: 2, width: 40 };
    const PROMPT: usize = 150;
    let (row, width, tokens) = (HEADS.row(), HEADS.query * HEADS.width, 3);
    let own = |sample: usize| PROMPT + sample * tokens..PROMPT + (sample + 1) * tokens;
    let spans = spans(&[(0..PROMPT, 0..0), (own(0), 0..PROMPT), (own(1), 0..PROMPT), (own(2), 0..PROMPT)]);
    let qkv = noise(own(2).end * row, 1);
    for (layers, window) in all_layers().flat_map(|layers| [None, Some(45)].map(|window| (layers, window))) {
        let scores = Scores { window, ..Scores::default() };
        let expected = layers.attention(&qkv, HEADS, scores, &spans).unwrap();
        let mut cache = KvCache::new(&[(HEADS, scores)], &[PROMPT], 3, tokens);
        cache.fill_prompts(0, &qkv[..PROMPT * row], &spans[..1]).unwrap();
        for token in 0..tokens {
            let places = [0, 1, 2].map(|sample| own(sample).start + token);
            let rows: Vec<f32> = places.iter().flat_map(|at| &qkv[at * row..(at + 1) * row]).copied().collect();
            let found = layers.attention_cached(&rows, &mut cache, 0, &[0, 1, 2], 0).unwrap();
            cache.advance(&[0, 1, 2]);
            for (sample, at) in places.into_iter().enumerate() {
                let values = &expected.values[at * width..(at + 1) * width];
                assert_close(&found.values[sample * width..(sample + 1) * width], &wide(values), 1e-6);
                let lse = &expected.lse[at * HEADS.query..(at + 1) * HEADS.query];
                assert_close(&found.lse[sample * HEADS.query..(sample + 1) * HEADS.query], &wide(lse), 1e-6);
            }
        }
    }
}

#[test]
fn attention_with_a_cache_matches_attention_over_all_rows() {
    // Prompts of 3 and 20 tokens with two samples each; the second sample finishes after one token.
    let (d, row) = (HEADS.width, HEADS.row());
    let prompts = spans(&[(0..3, 0..0), (3..23, 0..0)]);
    let prompt_rows = noise(23 * row, 1);
    for (layers, scores) in all_layers().flat_map(|layers| SCORES.map(|scores| (layers, scores))) {
        let mut cache = KvCache::new(&[(HEADS, scores)], &[3, 20], 2, 18);
        cache.fill_prompts(0, &prompt_rows, &prompts).unwrap();
        let mut completions: Vec<Vec<f32>> = vec![Vec::new(); 4];
        for step in 0..18 {
            let samples: &[usize] = if step == 0 { &[0, 1, 2, 3] } else { &[0, 2, 3] };
            assert_eq!(cache.position(2), 20 + step);
            let rows = noise(samples.len() * row, 10 + step as u64);
            let found = layers.attention_cached(&rows, &mut cache, 0, samples, 0).unwrap().values;
            cache.advance(samples);
            for ((sample, new), found) in samples.iter().zip(rows.chunks_exact(row)).zip(found.chunks_exact(4 * d)) {
                completions[*sample].extend_from_slice(new);
                let prompt = &prompts[sample / 2];
                let whole =
                    [&prompt_rows[prompt.rows.start * row..prompt.rows.end * row], &completions[*sample]].concat();
                let n = whole.len() / row;
                let expected = plain_attention(&wide(&whole), HEADS, scores, &spans(&[(0..n, 0..0)]));
                assert_close(found, &expected[(n - 1) * 4 * d..], 1e-6);
            }
        }
        let text = layers.attention_cached(&noise(row, 1), &mut cache, 0, &[2], 0).unwrap_err().to_string();
        assert!(text.contains("room in sample 2"), "{text}");
        // Keys and values of a prompt, W - 1 positions at most, and of its two samples, W positions each.
        let window = scores.window.unwrap_or(usize::MAX);
        let kept = |prompt: usize| prompt.min(window - 1) + 2 * window.min(18);
        assert_eq!(cache.bytes(), size_of::<f32>() * 2 * HEADS.key_value * d * (kept(3) + kept(20)));
    }
}

/// Both samples of a prompt, with completions of other lengths, become prompts of another cache, and those of a third one.
#[test]
fn a_continued_cache_attends_like_its_source() {
    let row = HEADS.row();
    let rows = |count: usize, seed: u64| noise(count * row, seed);
    let step = |cache: &mut KvCache, samples: &[usize], seed: u64| -> Vec<f32> {
        let layers = all_layers().next().unwrap();
        let found = layers.attention_cached(&rows(samples.len(), seed), cache, 0, samples, 0);
        cache.advance(samples);
        found.unwrap().values
    };
    for window in [None, Some(1), Some(2), Some(4), Some(5), Some(6), Some(100)] {
        let layer = (HEADS, Scores { window, ..Scores::default() });
        let mut source = KvCache::new(&[layer], &[3], 2, 9);
        source.fill_prompts(0, &rows(3, 1), &spans(&[(0..3, 0..0)])).unwrap();
        step(&mut source, &[0, 1], 2);
        (3..7).for_each(|seed| drop(step(&mut source, &[1], seed)));
        let mut continued = KvCache::continued(&[(&source, 1), (&source, 0)], 2).unwrap();
        assert_eq!([continued.position(0), continued.position(1), continued.samples()], [8, 4, 2]);
        let source_rows = [step(&mut source, &[1], 7), step(&mut source, &[0], 8)].concat();
        let continued_rows = [step(&mut continued, &[0], 7), step(&mut continued, &[1], 8)].concat();
        assert_eq!(continued_rows, source_rows, "{window:?}");
        let mut again = KvCache::continued(&[(&continued, 0)], 3).unwrap();
        assert_eq!(again.position(0), 9);
        for seed in 9..12 {
            assert_eq!(step(&mut again, &[0], seed), step(&mut source, &[1], seed), "{window:?}");
        }
        // The prompt, and the slots of the sample.
        let kept = window.map_or(9 + 3, |window| 9.min(window - 1) + 3.min(window));
        assert_eq!(again.bytes(), size_of::<f32>() * 2 * HEADS.key_value * HEADS.width * kept, "{window:?}");

        let wrong = KvCache::continued(&[(&source, 2)], 1).unwrap_err().to_string();
        assert!(wrong.contains("samples below 2"), "{wrong}");
        for layers in [vec![layer; 2], vec![(HEADS, Scores { window: Some(7), ..Scores::default() })]] {
            let other = KvCache::new(&layers, &[3], 1, 1);
            assert!(KvCache::continued(&[(&source, 0), (&other, 0)], 1).is_err());
        }
        assert!(KvCache::continued(&[], 1).is_err());
    }
}

#[test]
fn positions_ahead_attend_like_advanced_ones() {
    let row = HEADS.row();
    for window in [None, Some(1), Some(3), Some(50)] {
        let layers = [(HEADS, Scores { window, ..Scores::default() }); 2];
        let new = || {
            let mut cache = KvCache::new(&layers, &[3, 5], 1, 6);
            (0..2).for_each(|i| {
                cache.fill_prompts(i, &noise(8 * row, i as u64), &spans(&[(0..3, 0..0), (3..8, 0..0)])).unwrap();
            });
            cache
        };
        let mixed = |cache: &mut KvCache, layer: usize, step: usize, ahead: usize| {
            let rows = noise(2 * row, (10 * layer + step + 2) as u64);
            Layers::new().attention_cached(&rows, cache, layer, &[0, 1], ahead).unwrap().values
        };
        let (mut by_step, mut by_layer) = (new(), new());
        let mut expected = [Vec::new(), Vec::new()];
        for step in 0..5 {
            (0..2).for_each(|layer| expected[layer].push(mixed(&mut by_step, layer, step, 0)));
            by_step.advance(&[0, 1]);
        }
        for (layer, expected) in expected.iter().enumerate() {
            let found: Vec<_> = (0..5).map(|step| mixed(&mut by_layer, layer, step, step)).collect();
            assert_eq!(&found, expected, "{window:?}");
        }
        let full = Layers::new().attention_cached(&noise(2 * row, 1), &mut by_layer, 0, &[0, 1], 6).unwrap_err();
        assert!(full.to_string().contains("room in sample 0"), "{full}");
    }
}

#[test]
fn gradients_of_a_group_do_not_depend_on_other_groups() {
    // A prompt of two tiles with two completions, and a sequence alone.
    let (first, second) = ([(0..70, 0..0), (70..75, 0..70), (75..82, 0..70)], [(0..9, 0..0)]);
    let together = first.iter().cloned().chain([(82..91, 0..0)]).collect::<Vec<_>>();
    let (qkv, dvalues) = (noise(91 * HEADS.row(), 5), noise(91 * 24, 6));
    for layers in all_layers() {
        let gradient = |rows: std::ops::Range<usize>, ranges: &[(std::ops::Range<usize>, std::ops::Range<usize>)]| {
            let qkv = &qkv[rows.start * HEADS.row()..rows.end * HEADS.row()];
            let (spans, dvalues) = (spans(ranges), &dvalues[rows.start * 24..rows.end * 24]);
            let Mixed { values, lse } = layers.attention(qkv, HEADS, SCORES[0], &spans).unwrap();
            let of = AttentionGrad { qkv, values: &values, lse: &lse, dvalues };
            layers.attention_grad(of, HEADS, SCORES[0], &spans).unwrap()
        };
        let apart = [gradient(0..82, &first), gradient(82..91, &second)].concat();
        assert!(gradient(0..91, &together) == apart, "{layers:?}");
    }
}
