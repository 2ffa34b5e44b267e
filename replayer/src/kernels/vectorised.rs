//! How passes over rows are compiled.

/// Compiles a pass over a row twice, for AVX2 with FMA, where it vectorises, and for the baseline,
/// and picks one at run time. Both give the same bits if the body adds in a fixed order, as
/// `mul_add` rounds once either way. The reference and the policies share this macro, but none of
/// the passes.
macro_rules! vectorised {
    ($(#[$doc:meta])* $name:ident, $body:ident, ($($arg:ident: $type:ty),*) -> $result:ty) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $type),*) -> $result {
                    $body($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the two features it is compiled for were just detected.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use vectorised;
