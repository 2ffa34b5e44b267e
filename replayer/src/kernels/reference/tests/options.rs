//! Tests random combinations of the head's options against the loops over scalars.

use super::*;
use proptest::prelude::*;

/// Heads of all shapes, empty ones included; the padding holds NaN everywhere.
fn heads() -> impl Strategy<Value = Fixture> {
    let shape = (0usize..12, 0usize..5, 1usize..30, 0usize..12);
    let mask = prop_oneof![
        2 => Just(None),
        1 => Just(Some(f64::NEG_INFINITY)),
        3 => (-4.0f64..4.0).prop_map(Some),
    ];
    let softcap = prop_oneof![Just(None), (1.0f64..20.0).prop_map(Some)];
    let scale = prop_oneof![Just(1.0), 0.2f64..2.5];
    let switches = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.3));
    (shape, mask, softcap, scale, switches).prop_map(
        |((tokens, depth, valid, padding), mask, softcap, scale, (bias, smooth, given))| {
            let mut fixture = Fixture::new(tokens, depth, valid + padding, valid);
            fixture.k[valid * depth..].fill(f32::NAN);
            fixture.transform = Transform { scale, softcap, ..Transform::NONE };
            fixture.mask = mask;
            let fixture = if bias { fixture.with_bias() } else { fixture };
            let fixture = if smooth { fixture.with_smoothing() } else { fixture };
            if given { fixture.with_given() } else { fixture }
        },
    )
}

fn tiles() -> impl Strategy<Value = Tiles> {
    (1usize..14, 1usize..45).prop_map(|(tokens, vocab)| Tiles { tokens, vocab })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_set_of_options_is_what_loops_over_scalars_give(
        fixture in heads(),
        tiles in tiles(),
        filter in prop_oneof![Just(0.0), 0.01f64..0.7],
    ) {
        assert_is_naive(&fixture, &TermNoise { filter, ..NOISE }, tiles);
        assert_is_naive(&fixture, &TermNoise { filter, ..WHOLE }, tiles);
        let lse = naive(&fixture).0.lse;
        assert_plane_is_naive(&fixture, &lse, tiles);
    }
}

/// A captured lse need not be that of the logits.
#[test]
fn a_wrong_lse_is_taken_as_it_is() {
    let fixture = with_options(Fixture::usual());
    let lse: Vec<f64> = naive(&fixture).0.lse.iter().map(|lse| lse - 0.3).collect();
    assert_plane_is_naive(&fixture, &lse, SMALL_TILES);
}
