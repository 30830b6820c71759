// Package replay walks traces of real use through the radix code without a model: the same Forest and Pools as the
// engine's, the same calls in the same order (match, lock, touch, planned captures, insert, publish, advance, exact
// tail at a turn's end, unlock, eviction under pressure, copy on extend), so that what is measured is the product's
// own bookkeeping and not a model of it.
//
// Invariants:
//   - A trace is parsed completely, within bounds, before it is walked; a walk is a function of trace and options
//     alone. Time is the trace's.
//   - Tokens are made from the trace's block ids: equal ids give equal tokens, different ones different tokens.
//   - Device bytes in use never pass the budget. Pages and states share it: nothing is set aside for either.
//   - Forest.Check holds at the end of every walk, and every reference that the walk took has been given back.
//   - A walk without a budget reuses whatever whole pages an unlimited cache would (see Ideal, which shares no code).
package replay
