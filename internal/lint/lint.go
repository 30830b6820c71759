// Package lint holds the project's style rules as tests; it has no other code.
//
// What it refuses, each time saying why: imports against the one direction, cgo outside kernels,
// the environment read outside cmd/rocket, packages without a comment, names that say nothing,
// lock files that name a download host, files too long to read.
package lint
