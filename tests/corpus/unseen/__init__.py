"""Programs in numpy whose jobs and faults are drawn from wide ranges: one set of ranges to develop on,
another, disjoint, to report on."""
