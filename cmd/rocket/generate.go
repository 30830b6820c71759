package main

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"unicode/utf8"

	"rocket/engine"
	"rocket/engine/chat"
)

type generateCmd struct {
	engineFlags
	Prompt      string   `help:"Text to go on from; - reads standard input." required:"" placeholder:"TEXT"`
	Chat        bool     `help:"Send the prompt as a user message through the chat template."`
	MaxTokens   int      `help:"Tokens to generate at most." default:"256"`
	Temperature float64  `help:"0 takes the likeliest token." default:"0"`
	TopP        float64  `help:"Smallest set of tokens with this probability." default:"1"`
	TopK        int      `help:"Likeliest tokens only; 0: all." default:"0"`
	Seed        *int64   `help:"Seed; drawn when absent." placeholder:"N"`
	Stop        []string `help:"String that ends the text." placeholder:"TEXT" sep:"none"`
}

// generated is what --json prints.
type generated struct {
	Model            string  `json:"model"`
	Text             string  `json:"text"`
	Tokens           []int32 `json:"tokens"`
	FinishReason     string  `json:"finish_reason"`
	Seed             int64   `json:"seed"`
	PromptTokens     int     `json:"prompt_tokens"`
	CompletionTokens int     `json:"completion_tokens"`
	TTFTMillis       float64 `json:"ttft_ms"`
	TokensPerSecond  float64 `json:"tokens_per_second"`
}

func (g generateCmd) check() error {
	switch {
	case g.MaxTokens < 1:
		return usage("--max-tokens: want 1 or more, not %d", g.MaxTokens)
	case !(g.Temperature >= 0): // NaN too
		return usage("--temperature: want 0 or more, not %g", g.Temperature)
	case !(g.TopP > 0 && g.TopP <= 1):
		return usage("--top-p: want more than 0 and at most 1, not %g", g.TopP)
	case g.TopK < 0:
		return usage("--top-k: want 0 or more, not %d", g.TopK)
	}
	return nil
}

func (g generateCmd) Run(c *console) error {
	if err := g.check(); err != nil {
		return err
	}
	prompt := g.Prompt
	if prompt == "-" {
		data, err := io.ReadAll(os.Stdin)
		if err != nil {
			return fmt.Errorf("read standard input: %w", err)
		}
		prompt = string(data)
	}
	if !utf8.ValidString(prompt) {
		return usage("--prompt: not valid UTF-8")
	}
	l, err := g.load(c, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer l.close()
	line, err := g.line(l, prompt)
	if err != nil {
		return err
	}
	if len(line) == 0 {
		return usage("--prompt: there is no text to go on from")
	}
	seed := rand.Int64N(1 << 53)
	if g.Seed != nil {
		seed = *g.Seed
	}
	seq, _, err := l.engine.Open(c.ctx, line, engine.OpenOptions{Lazy: true})
	if err != nil {
		return err
	}
	defer l.engine.Release(seq)
	run, err := l.engine.Start(c.ctx, seq, engine.TurnRequest{
		Line: line, MaxTokens: g.MaxTokens, Temperature: float32(g.Temperature), TopP: float32(g.TopP), TopK: g.TopK,
		Seed: uint64(seed), Stop: g.Stop, Logprobs: -1,
	})
	if err != nil {
		return err
	}
	return g.stream(c, l, run, seed)
}

func (g generateCmd) line(l *loaded, prompt string) ([]int32, error) {
	if !g.Chat {
		return l.tok.Encode(prompt), nil
	}
	if l.template == nil {
		return nil, chat.ErrNoTemplate
	}
	return l.template.Prompt([]chat.Message{{Role: "user", Content: prompt}}, true)
}

// stream prints the text as it comes, except what may turn out to be the
// beginning of a stop string.
func (g generateCmd) stream(c *console, l *loaded, run *engine.Run, seed int64) error {
	hold := 0
	for _, s := range g.Stop {
		hold = max(hold, len(s)-1)
	}
	decoder := l.tok.NewStream()
	var text strings.Builder
	ids := []int32{}
	printed := 0
	for {
		tokens, state := run.Read(len(ids))
		for _, t := range tokens {
			ids = append(ids, t.ID)
			text.WriteString(decoder.Push(t.ID))
		}
		run.Ack(len(ids))
		ended := state.Phase == engine.Done
		if ended {
			text.WriteString(decoder.Flush())
		}
		whole := text.String()
		show := max(printed, runeStart(whole, len(whole)-hold))
		if ended {
			show = len(whole)
			if state.StopBytes >= 0 {
				show = max(printed, min(state.StopBytes, len(whole)))
			}
		}
		if !c.json {
			if _, err := io.WriteString(c.out, whole[printed:show]); err != nil {
				return fmt.Errorf("write: %w", err)
			}
		}
		printed = show
		if ended {
			return g.end(c, l, whole[:printed], ids, state, seed)
		}
		select {
		case <-run.Ready():
		case <-c.ctx.Done():
			run.Cancel() // what is there is printed, and the run ends as cancelled
			<-run.Ready()
		}
	}
}

// runeStart moves i back to where a character begins.
func runeStart(s string, i int) int {
	for i = max(i, 0); i > 0 && i < len(s) && !utf8.RuneStart(s[i]); i-- {
	}
	return i
}

func (g generateCmd) end(c *console, l *loaded, text string, ids []int32, state engine.RunState, seed int64) error {
	u := state.Usage
	rate := 0.0
	if u.Decode > 0 {
		rate = float64(len(ids)-1) / u.Decode.Seconds()
	}
	if c.json && state.Err == nil {
		err := c.print(generated{Model: l.name, Text: text, Tokens: ids, FinishReason: state.Finish, Seed: seed,
			PromptTokens: u.PromptTokens, CompletionTokens: len(ids), TTFTMillis: float64(u.TTFT.Microseconds()) / 1000, TokensPerSecond: rate})
		if err == nil && state.Finish == engine.FinishCancelled {
			err = errReported{c.interrupted()}
		}
		return err
	}
	if !c.json {
		if _, err := io.WriteString(c.out, "\n"); err != nil {
			return fmt.Errorf("write: %w", err)
		}
	}
	switch {
	case state.Err != nil:
		return fmt.Errorf("generate: %w", state.Err)
	case state.Finish == engine.FinishCancelled:
		return c.interrupted()
	}
	if c.errTerminal {
		fmt.Fprintf(c.err, "%s: %d tokens, %.1f a second, first after %.0f ms\n", state.Finish, len(ids), rate, float64(u.TTFT.Microseconds())/1000)
	}
	return nil
}
