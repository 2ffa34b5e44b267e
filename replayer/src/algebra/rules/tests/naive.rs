//! Optimizers as loops over f32, written from the documentation of torch and optax. Every operation
//! is rounded to what the parameters are stored in.

use std::collections::{BTreeMap, BTreeSet};

use crate::kernels::round::Precision;

/// Tensors by name.
pub(crate) type State = BTreeMap<&'static str, Vec<f32>>;

/// What parameters and states are stored in.
pub(crate) const ROUNDING: [[Precision; 2]; 3] = [
    [Precision::F32, Precision::F32],
    [Precision::F32, Precision::Bf16],
    [Precision::Bf16, Precision::Bf16],
];

/// A class of optimizers.
#[derive(Debug)]
pub(crate) struct Kind {
    /// Its name.
    pub class: &'static str,
    /// Its switches.
    pub switches: &'static [&'static str],
    /// One element of one step.
    element: fn(&Job, Element) -> Element,
    /// The states that it has.
    states: &'static [&'static str],
}

const TORCH: &[&str] = &["maximize"];
const DECOUPLED: &[&str] = &["maximize", "decoupled_weight_decay"];
const MOMENTS: &[&str] = &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
const OF_ROOTS: &[&str] = &["square_avg", "grad_avg", "momentum_buffer"];

const fn kind(
    class: &'static str,
    switches: &'static [&'static str],
    states: &'static [&'static str],
    element: fn(&Job, Element) -> Element,
) -> Kind {
    Kind { class, switches, element, states }
}

/// All of them.
pub(crate) const JOBS: &[Kind] = &[
    kind("SGD", &["maximize", "nesterov"], &["momentum_buffer"], Job::sgd),
    kind("Adam", &["maximize", "amsgrad"], MOMENTS, Job::adam),
    kind("AdamW", &["maximize", "amsgrad"], MOMENTS, Job::adam),
    kind("Adagrad", TORCH, &["sum"], Job::adagrad),
    kind("optax.adagrad", &[], &["sum"], Job::adagrad),
    kind("RMSprop", &["maximize", "centered"], OF_ROOTS, Job::rmsprop),
    kind(
        "rmsprop",
        &["centered", "nesterov", "bias_correction", "eps_in_sqrt"],
        OF_ROOTS,
        Job::rmsprop,
    ),
    kind("Lion", TORCH, &["exp_avg"], Job::lion),
    kind("NAdam", DECOUPLED, &["exp_avg", "exp_avg_sq"], Job::nadam),
    kind("nadamw", &[], &["exp_avg", "exp_avg_sq"], Job::nadam),
    kind("RAdam", DECOUPLED, &["exp_avg", "exp_avg_sq"], Job::radam),
    kind("radam", &[], &["exp_avg", "exp_avg_sq"], Job::radam),
    kind("Adamax", TORCH, &["exp_avg", "exp_inf"], Job::adamax),
    kind("adamaxw", &[], &["exp_avg", "exp_inf"], Job::adamax),
];

/// The numbers of one element: gradient, parameter, and states in the order of the class.
#[derive(Clone, Copy)]
pub(crate) struct Element {
    g: f32,
    p: f32,
    s: [f32; 3],
}

/// An optimizer at work.
pub(crate) struct Job {
    /// Its class.
    pub class: &'static str,
    /// What parameters are stored in.
    pub parameters: Precision,
    /// What states are stored in.
    pub states: Precision,
    /// By name.
    pub hyper: BTreeMap<&'static str, f64>,
    /// Those that are on.
    pub switches: BTreeSet<&'static str>,
    /// The parameter.
    pub parameter: Vec<f32>,
    /// The states.
    pub state: State,
    /// Which step it takes, from 1.
    pub step: u32,
    /// Which step it takes this one for.
    pub counts_as: Option<f64>,
    /// Which moment alone a fault of the bias correction is in.
    pub faulty_moment: Option<u32>,
    /// What it does wrongly, by the name of the cause.
    pub fault: Option<&'static str>,
    /// Whether the update takes states before they are rounded to what they are stored in.
    keeps: bool,
    /// Whether numbers that all elements share are rounded to what parameters are stored in.
    rounds_scalars: bool,
    kind: &'static Kind,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Job { class, parameters, states, hyper, switches, keeps, rounds_scalars, .. } = self;
        let ways = (keeps, rounds_scalars);
        write!(f, "{class} in {parameters:?}, {states:?} {ways:?} {switches:?} {hyper:?}")
    }
}

impl Job {
    pub(crate) fn new(
        kind: &'static Kind,
        [parameters, states]: [Precision; 2],
        hyper: BTreeMap<&'static str, f64>,
        switches: BTreeSet<&'static str>,
        [keeps, rounds_scalars]: [bool; 2],
    ) -> Job {
        let (class, parameter, state) = (kind.class, Vec::new(), State::new());
        let (step, counts_as, fault) = (0, None, None);
        Job {
            class,
            parameters,
            states,
            hyper,
            switches,
            parameter,
            state,
            step,
            counts_as,
            faulty_moment: None,
            fault,
            keeps,
            rounds_scalars,
            kind,
        }
    }

    /// Takes a step.
    pub(crate) fn run(&mut self, grad: &[f32]) {
        for (at, &g) in grad.iter().enumerate() {
            let mut s = [0.0; 3];
            for (own, name) in s.iter_mut().zip(self.kind.states) {
                *own = self.state.get(name).map_or(0.0, |state| state[at]);
            }
            let Element { p, s, .. } =
                (self.kind.element)(self, Element { g, p: self.parameter[at], s });
            self.parameter[at] = p;
            for (own, name) in s.iter().zip(self.kind.states) {
                let state = self.state.entry(name).or_insert_with(|| vec![0.0; grad.len()]);
                state[at] = self.states.round(*own);
            }
        }
    }

    pub(crate) fn is_optax(&self) -> bool {
        self.class.starts_with(char::is_lowercase)
    }

    fn has(&self, fault: &str) -> bool {
        self.fault == Some(fault)
    }

    fn is_on(&self, switch: &str, toggled_by: &str) -> bool {
        self.switches.contains(switch) != self.has(toggled_by)
    }

    fn number(&self, name: &str) -> f64 {
        self.hyper[name]
    }

    /// Which step the formulas have.
    fn t(&self) -> f64 {
        let own = f64::from(self.step);
        if self.has("step-counter") { self.counts_as.unwrap_or(own) } else { own }
    }

    /// Rounds an operation.
    fn r(&self, x: f32) -> f32 {
        self.parameters.round(x)
    }

    /// Rounds a number that all elements share.
    fn c(&self, x: f64) -> f32 {
        if self.rounds_scalars { self.r(x as f32) } else { x as f32 }
    }

    /// Stores a state, and hands on what the update takes of it.
    fn kept(&self, x: f32) -> f32 {
        if self.keeps { x } else { self.states.round(x) }
    }

    /// `β x + (1 - β) y`
    fn moving(&self, x: f32, y: f32, beta: f64) -> f32 {
        self.r(self.r(self.c(beta) * x) + self.r(self.c(1.0 - beta) * y))
    }

    fn is_decoupled(&self) -> bool {
        let own = matches!(self.class, "AdamW" | "nadamw" | "adamaxw" | "Lion")
            || self.switches.contains("decoupled_weight_decay");
        own != self.has("decay-coupled")
    }

    /// The gradient with sign and decay, and the parameter with its own decay.
    fn begun(&self, Element { g, p, .. }: Element) -> (f32, f32) {
        let g = if self.is_on("maximize", "update-ascends") { -g } else { g };
        let decay = self.number("weight_decay");
        match self.is_decoupled() {
            true => (g, self.r(p * self.c(1.0 - self.number("lr") * decay))),
            false => (self.r(g + self.r(self.c(decay) * p)), p),
        }
    }

    /// How often the moments are corrected, of a rule that corrects them so often.
    fn corrections(&self, own: i32) -> i32 {
        match self.fault {
            Some("bias-correction-missing") => 0,
            Some("bias-correction-twice" | "bias-correction-added") => own + 1,
            _ => own,
        }
    }

    fn correction(&self, beta: f64, own: i32) -> f64 {
        (1.0 - beta.powf(self.t())).powi(self.corrections(own))
    }

    /// The root of a second moment, with ε.
    fn root(&self, second: f32, is_inside: bool) -> f32 {
        let eps = self.c(self.number("eps"));
        match is_inside != self.has("eps-inside-sqrt") {
            true => self.r(self.r(second + eps).sqrt()),
            false => self.r(self.r(second.sqrt()) + eps),
        }
    }

    fn sgd(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let (momentum, lr) = (self.number("momentum"), self.c(self.number("lr")));
        let [mut buffer, ..] = element.s;
        buffer = match momentum == 0.0 || self.step == 1 || self.has("state-reset") {
            true => g,
            false => {
                let share = self.c(1.0 - self.number("dampening"));
                self.r(self.r(self.c(momentum) * buffer) + self.r(share * g))
            }
        };
        let used = self.kept(buffer);
        let moved = match (momentum != 0.0, self.is_on("nesterov", "nesterov")) {
            (false, _) => g,
            (true, true) => self.r(g + self.r(self.c(momentum) * used)),
            (true, false) => used,
        };
        Element { p: self.r(p - self.r(lr * moved)), s: [buffer, 0.0, 0.0], ..element }
    }

    /// The correction of the first or second moment, where the fault may be in one of them.
    fn correction_of(&self, moment: u32, beta: f64) -> f64 {
        match self.faulty_moment.is_some_and(|faulty| faulty != moment) {
            true => 1.0 - beta.powf(self.t()),
            false => self.correction(beta, 1),
        }
    }

    fn adam(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let [m, v, most] = element.s;
        let (beta1, beta2) = (self.number("beta1"), self.number("beta2"));
        let m = self.moving(m, g, beta1);
        let v = self.moving(v, self.r(g * g), beta2);
        let most = if self.switches.contains("amsgrad") { most.max(self.kept(v)) } else { v };
        let [first, second] = [m, most].map(|x| self.kept(x));
        let mut first = self.r(first / self.c(self.correction_of(1, beta1)));
        if self.has("nesterov") {
            // As optax's nadam, which corrects the moment by the power of the next step.
            let next = 1.0 - beta1.powf(self.t() + 1.0);
            let own = self.r(self.r(g * self.c(1.0 - beta1)) / self.c(1.0 - beta1.powf(self.t())));
            first = self.r(own + self.r(self.r(self.c(beta1) * m) / self.c(next)));
        }
        let second = self.r(second / self.c(self.correction_of(2, beta2)));
        let moved = self.r(first / self.root(second, false));
        let p = self.r(p - self.r(self.c(self.number("lr")) * moved));
        Element { p, s: [m, v, most], ..element }
    }

    fn adagrad(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let before = if self.has("state-reset") { 0.0 } else { element.s[0] };
        let sum = self.r(before + self.r(g * g));
        let lr = self.number("lr") / (1.0 + (self.t() - 1.0) * self.number("lr_decay"));
        let root = self.root(self.kept(sum), self.is_optax());
        let p = self.r(p - self.r(self.r(g * self.c(lr)) / root));
        Element { p, s: [sum, 0.0, 0.0], ..element }
    }

    fn rmsprop(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let (alpha, lr) = (self.number("alpha"), self.c(self.number("lr")));
        let momentum = self.c(self.number("momentum"));
        let [v, m, buffer] = element.s;
        let v = self.moving(v, self.r(g * g), alpha);
        let m = self.moving(m, g, alpha);
        let own = i32::from(self.switches.contains("bias_correction"));
        let correction = self.c(self.correction(alpha, own));
        let [mut second, first] = [v, m].map(|x| self.r(self.kept(x) / correction));
        if self.is_on("centered", "not-centered") {
            second = self.r(second - self.r(first * first));
        }
        let is_inside = self.switches.contains("eps_in_sqrt");
        let moved = self.r(g / self.root(second, is_inside));
        let holds_changes = self.is_optax() != self.has("lr-in-momentum");
        let addend = if holds_changes { -self.r(lr * moved) } else { moved };
        let buffer = self.r(self.r(momentum * buffer) + addend);
        let mut used = self.kept(buffer);
        if self.switches.contains("nesterov") {
            used = self.r(self.r(momentum * used) + addend);
        }
        let update = match (momentum == 0.0, holds_changes) {
            (true, _) => -self.r(lr * moved),
            (false, true) => used,
            (false, false) => -self.r(lr * used),
        };
        Element { p: self.r(p + update), s: [v, m, buffer], ..element }
    }

    fn lion(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let (mut of_update, mut of_moment) = (self.number("beta1"), self.number("beta2"));
        if self.has("betas-exchanged") {
            (of_update, of_moment) = (of_moment, of_update);
        }
        let mixed = self.moving(element.s[0], g, of_update);
        let m = self.moving(element.s[0], g, of_moment);
        let sign = |x: f32| f32::from(i8::from(x > 0.0) - i8::from(x < 0.0));
        let moved = match self.fault {
            Some("sign-missing") => mixed,
            Some("update-from-new-moment") => sign(self.kept(m)),
            _ => sign(mixed),
        };
        let p = self.r(p - self.r(self.c(self.number("lr")) * moved));
        Element { p, s: [m, 0.0, 0.0], ..element }
    }

    /// The momentum of a step.
    fn momentum_of(&self, step: f64) -> f64 {
        let (beta1, mut decay) = (self.number("beta1"), self.number("momentum_decay"));
        let is_constant = self.is_optax() != self.has("momentum-schedule");
        if self.is_optax() {
            decay = 4e-3;
        }
        if is_constant { beta1 } else { beta1 * (1.0 - 0.5 * 0.96f64.powf(step * decay)) }
    }

    fn nadam(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let (beta1, beta2) = (self.number("beta1"), self.number("beta2"));
        let m = self.moving(element.s[0], g, beta1);
        let v = self.moving(element.s[1], self.r(g * g), beta2);
        let t = self.t();
        let mut product = 1f32;
        for step in 1..=t as u32 {
            product *= self.momentum_of(step.into()) as f32;
        }
        let (this, next) = (self.momentum_of(t), self.momentum_of(t + 1.0));
        let times = self.corrections(1);
        let second = self.r(self.kept(v) / self.c(self.correction(beta2, 1)));
        let (lr, product) = (self.number("lr"), f64::from(product));
        let root = self.root(second, false);
        let (of_grad, of_moment) = match self.has("nesterov") {
            true => (0.0, 1.0 / (1.0 - product).powi(times)),
            false => (
                (1.0 - this) / (1.0 - product).powi(times),
                next / (1.0 - product * next).powi(times),
            ),
        };
        let p = self.r(p - self.r(self.r(self.c(lr * of_grad) * g) / root));
        let p = self.r(p - self.r(self.r(self.c(lr * of_moment) * self.kept(m)) / root));
        Element { p, s: [m, v, 0.0], ..element }
    }

    fn radam(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let (beta1, beta2, t) = (self.number("beta1"), self.number("beta2"), self.t());
        let m = self.moving(element.s[0], g, beta1);
        let v = self.moving(element.s[1], self.r(g * g), beta2);
        let first = self.r(self.kept(m) / self.c(self.correction(beta1, 1)));
        let longest = 2.0 / (1.0 - beta2) - 1.0;
        let length = longest - 2.0 * t * beta2.powf(t) / (1.0 - beta2.powf(t));
        // torch multiplies by the learning rate first, optax last.
        let lr = self.c(self.number("lr"));
        let first = if self.is_optax() { first } else { self.r(lr * first) };
        let mut moved = first;
        if (length > 5.0) != self.has("rectification-threshold") {
            let second = self.correction(beta2, 1);
            let scale = match self.is_optax() {
                true => self.r(1.0 / self.root(self.r(self.kept(v) / self.c(second)), false)),
                false => self.r(self.c(second.sqrt()) / self.root(self.kept(v), false)),
            };
            moved = self.r(first * scale);
            if !self.has("rectification-missing") {
                let own = (length - 4.0) * (length - 2.0) * longest;
                let most = (longest - 4.0) * (longest - 2.0) * length;
                moved = self.r(moved * self.c((own / most).sqrt()));
            }
        }
        let moved = if self.is_optax() { self.r(lr * moved) } else { moved };
        let p = self.r(p - moved);
        Element { p, s: [m, v, 0.0], ..element }
    }

    fn adamax(&self, element: Element) -> Element {
        let (g, p) = self.begun(element);
        let (beta1, eps) = (self.number("beta1"), self.c(self.number("eps")));
        let m = self.moving(element.s[0], g, beta1);
        let is_elsewhere = self.has("eps-elsewhere");
        let size = if is_elsewhere { g.abs() } else { self.r(g.abs() + eps) };
        let most = self.r(self.c(self.number("beta2")) * element.s[1]).max(size);
        let divisor = if is_elsewhere { self.r(self.kept(most) + eps) } else { self.kept(most) };
        let first = self.r(self.kept(m) / self.c(self.correction(beta1, 1)));
        let moved = self.r(first / divisor);
        let p = self.r(p - self.r(self.c(self.number("lr")) * moved));
        Element { p, s: [m, most, 0.0], ..element }
    }
}
