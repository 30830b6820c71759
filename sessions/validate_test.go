package sessions

import (
	"encoding/json"
	"strings"
	"testing"
)

// Numbers that are short in a call and long in the ledger are bounded, each and
// together.
func TestToolCallsWithLongNumbers(t *testing.T) {
	many := strings.Repeat("1e300,", exponentsMax/300)
	for calls, taken := range map[string]bool{
		`[1,-2.5e10,0.1E-300,"1e99999","\"1e99999",{"1e99999":true,"a":false}]`: true,
		`[1e131071]`: false, `[-1e309]`: false, `{"a":{"b":1e400}}`: false, `["\\\\",1e400]`: false, `[0e2000000]`: false, `[1e-2000000]`: false,
		`[` + strings.Repeat("9", 400) + `]`: false,
		`[` + many + `1]`:                    true,
		`[` + many + `1e300]`:                false,
	} {
		msgs := []Message{{Role: "assistant", ToolCalls: json.RawMessage(calls)}}
		if err := checkPrompt(msgs, nil); (err == nil) != taken {
			t.Errorf("%.60s: %v", calls, err)
		}
	}
	many = "[" + many + "1]"
	twice := []Message{{Role: "assistant", ToolCalls: json.RawMessage(many)}, {Role: "assistant", ToolCalls: json.RawMessage(many)}}
	wantCode(t, checkPrompt(twice, nil), CodeInvalid, "messages[1].tool_calls")
}
