package sessions

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"unicode/utf8"
)

// checkTurn refuses what makes no sense and fills in the defaults.
func checkTurn(r *TurnRequest) error {
	if err := checkPrompt(r.Messages, r.Input); err != nil {
		return err
	}
	for _, f := range []struct {
		name     string
		v        **int
		standard int
		min, max int
	}{{"max_tokens", &r.MaxTokens, MaxTokensDefault, 1, math.MaxInt32}, {"top_k", &r.TopK, 0, 0, TopKMax}} {
		if *f.v == nil {
			*f.v = &f.standard
		}
		if **f.v < f.min || **f.v > f.max {
			return invalid(f.name, "must be between %d and %d", f.min, f.max)
		}
	}
	for _, f := range []struct {
		name     string
		v        **float64
		standard float64
		min, max float64
	}{{"temperature", &r.Temperature, 0, 0, TemperatureMax}, {"top_p", &r.TopP, 1, 0, 1}} {
		if *f.v == nil {
			*f.v = &f.standard
		}
		if v := **f.v; !(v >= f.min && v <= f.max) {
			return invalid(f.name, "must be between %g and %g", f.min, f.max)
		}
	}
	if *r.TopP == 0 {
		return invalid("top_p", "must be greater than 0")
	}
	if r.Logprobs != nil && (*r.Logprobs < 0 || *r.Logprobs > LogprobsMax) {
		return invalid("logprobs", "must be between 0 and %d", LogprobsMax)
	}
	if r.MTP != nil && r.MTP.MaxDepth != nil && (*r.MTP.MaxDepth < 0 || *r.MTP.MaxDepth > MTPDepthMax) {
		return invalid("mtp.max_depth", "must be between 0 and %d", MTPDepthMax)
	}
	if len(r.Stop) > StopMax {
		return invalid("stop", "at most %d stop strings are allowed", StopMax)
	}
	for i, stop := range r.Stop {
		if err := checkText(fmt.Sprintf("stop[%d]", i), stop, StopBytesMax); err != nil {
			return err
		}
		if stop == "" {
			return invalid(fmt.Sprintf("stop[%d]", i), "must not be empty")
		}
	}
	if r.Seed == nil {
		seed := rand.Int64N(SeedDrawnMax)
		r.Seed = &seed
	}
	if *r.Seed < 0 {
		return invalid("seed", "must not be negative")
	}
	return nil
}

func checkPrompt(msgs []Message, input *string) error {
	if len(msgs) > 0 && input != nil {
		return invalid("input", "messages and input exclude each other")
	}
	if len(msgs) > MessagesMax {
		return invalid("messages", "at most %d messages are allowed", MessagesMax)
	}
	written := 0
	for i, m := range msgs {
		if m.Role == "" {
			return invalid(fmt.Sprintf("messages[%d].role", i), "must not be empty")
		}
		if !utf8.ValidString(m.Content) || strings.ContainsRune(m.Content, 0) {
			return invalid(fmt.Sprintf("messages[%d].content", i), "must be UTF-8 text without NUL characters")
		}
		for _, f := range []struct{ name, text string }{{"name", m.Name}, {"tool_call_id", m.ToolCallID}} {
			if !utf8.ValidString(f.text) || strings.ContainsRune(f.text, 0) {
				return invalid(fmt.Sprintf("messages[%d].%s", i, f.name), "must be UTF-8 text without NUL characters")
			}
		}
		if escapesNUL(m.ToolCalls) {
			return invalid(fmt.Sprintf("messages[%d].tool_calls", i), "must be without NUL characters")
		}
		if n := exponents(m.ToolCalls); n > exponentsMax-written {
			return invalid(fmt.Sprintf("messages[%d].tool_calls", i), "has numbers that are too long when they are written out")
		} else {
			written += n
		}
	}
	if input != nil && (!utf8.ValidString(*input) || strings.ContainsRune(*input, 0)) {
		return invalid("input", "must be UTF-8 text without NUL characters")
	}
	return nil
}

// exponentsMax bounds the exponents of all numbers in a prompt's tool calls
// together: Postgres keeps 1e300 in a few bytes, and writes it out in as many as
// it has digits whenever the turn is read.
const exponentsMax = 1 << 20

// exponents sums those of JSON's numbers; more than exponentsMax when one is
// beyond what a double holds.
func exponents(data []byte) (sum int) {
	for i, text := 0, false; i < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			text = !text
		case text && c == '\\':
			i++
		case !text && c >= '0' && c <= '9':
			from := i
			for i < len(data) && strings.IndexByte("0123456789.eE+-", data[i]) >= 0 {
				i++
			}
			number := string(data[from:i])
			i--
			if _, err := strconv.ParseFloat(number, 64); err != nil {
				return exponentsMax + 1
			}
			if e := strings.IndexAny(number, "eE"); e >= 0 {
				n, err := strconv.Atoi(number[e+1:]) // of 0, and below what a double holds, there may be more
				if n = max(n, -n); err != nil || n > exponentsMax-sum {
					return exponentsMax + 1
				}
				sum += n
			}
		}
	}
	return sum
}

// escapesNUL finds \u0000 in JSON, which Postgres does not keep.
func escapesNUL(data []byte) bool {
	for i := 0; i+1 < len(data); i++ {
		if data[i] != '\\' {
			continue
		}
		if strings.HasPrefix(string(data[i+1:min(i+6, len(data))]), "u0000") {
			return true
		}
		i++
	}
	return false
}

// checkText refuses what Postgres cannot store and what is too long.
func checkText(field, text string, bytesMax int) error {
	switch {
	case len(text) > bytesMax:
		return invalid(field, "must have at most %d bytes", bytesMax)
	case !utf8.ValidString(text):
		return invalid(field, "must be UTF-8")
	case strings.ContainsRune(text, 0):
		return invalid(field, "must not contain NUL characters")
	}
	return nil
}

func checkLabels(field string, labels map[string]string) error {
	if len(labels) > LabelsMax {
		return invalid(field, "at most %d labels are allowed", LabelsMax)
	}
	for k, v := range labels {
		if k == "" {
			return invalid(field, "a label's name must not be empty")
		}
		if err := checkText(field+"."+k, k, LabelKeyBytesMax); err != nil {
			return err
		}
		if err := checkText(field+"."+k, v, LabelValueBytesMax); err != nil {
			return err
		}
	}
	return nil
}

// checkTTL takes a TTL of 0 for none.
func checkTTL(seconds *int) (*int, error) {
	switch {
	case seconds == nil || *seconds == 0:
		return nil, nil
	case *seconds < 0 || *seconds > TTLSecondsMax:
		return nil, invalid("ttl_seconds", "must be between 0 and %d", TTLSecondsMax)
	}
	return seconds, nil
}
