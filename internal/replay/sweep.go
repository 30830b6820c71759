package replay

import "context"

// Measure walks a trace and adds the ideal, and, from a walk without a budget, what its sessions need.
func Measure(ctx context.Context, t *Trace, o Options) (Result, error) {
	r, err := Walk(ctx, t, o)
	if err != nil {
		return Result{}, err
	}
	r.setIdeal(Ideal(t))
	if o.Budget > 0 && len(t.Sessions) > 0 {
		free := o
		free.Budget, free.Served = 0, nil
		whole, err := Walk(ctx, t, free)
		if err != nil {
			return Result{}, err
		}
		if s := whole.Sessions; s != nil {
			s.fit(o.Budget)
			if r.Sessions != nil {
				m := r.Sessions
				s.FitResident, s.ResidentMax, s.ReplayMean, s.ReplayMax = m.FitResident, m.ResidentMax, m.ReplayMean, m.ReplayMax
			}
			r.Sessions = s
		}
	}
	return r, nil
}

func (r *Result) setIdeal(u Unlimited) {
	r.IdealTokens = u.Cached
	r.IdealRate = float64(u.Cached) / float64(max(u.Prompt, 1))
	r.LineSharing = float64(u.Pages) / float64(max(u.LinePages, 1))
}

// SweepSteps are the budgets of Sweep, in percent of the peak of a walk without a budget.
var SweepSteps = []int64{10, 20, 30, 40, 50, 60, 70, 80, 90, 100}

// Sweep walks the trace without a budget, then under every policy at each of SweepSteps, and hands out each result.
func Sweep(ctx context.Context, t *Trace, o Options, policies []string, each func(Result) error) error {
	ideal := Ideal(t)
	walk := func(budget int64, percent int64, policy string) (Result, error) {
		o.Budget, o.Policy = budget, policy
		r, err := Walk(ctx, t, o)
		if err != nil {
			return Result{}, err
		}
		r.Percent = percent
		r.setIdeal(ideal)
		return r, each(r)
	}
	peak, err := walk(0, 0, policies[0])
	if err != nil {
		return err
	}
	for _, percent := range SweepSteps {
		for _, policy := range policies {
			if _, err := walk(max(peak.PeakBytes*percent/100, 1), percent, policy); err != nil {
				return err
			}
		}
	}
	return nil
}
