// corpus writes the training data of rocket-nano as JSON lines on standard output: Go files and chats made from them.
//
//	go run ./models/nano/corpus core DIR... wide DIR... > corpus.jsonl
//
// DIRs are GOROOT/src and module folders; a folder without a permissive licence of its own is left out, and what was
// taken is listed on standard error. A file record is {"k":"f","p":path,"g":"core"|"wide","t":text}; a chat record is
// {"k":"c","p":path,"g":…,"m":[[role,text],…]}. Held-out files are those with crc32(path) divisible by 50; "n" is, for
// them, the share of their five-line windows that a file outside the held-out set has too.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"hash/crc32"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Limits of what is taken, in bytes unless said otherwise.
const (
	minFile, maxFile   = 200, 200_000
	maxWideFile        = 60_000
	longLine, maxLong  = 300, 3 // a file with more long lines than maxLong is a table
	minDoc, maxDoc     = 30, 500
	minFunc, maxFunc   = 40, 1500
	maxRetrieval       = 14_000
	minRetrieval       = 3_000
	heldOutOneIn       = 50
	windowLines        = 5
	completeFromLines  = 6
	chatOneInWide      = 3
	retrievalOneInFile = 6
)

type record struct {
	Kind  string      `json:"k"`
	Path  string      `json:"p"`
	Group string      `json:"g"`
	Near  float64     `json:"n,omitempty"`
	Text  string      `json:"t,omitempty"`
	Chat  [][2]string `json:"m,omitempty"`
}

// source is one file and the chats made from it.
type source struct {
	file  record
	chats []record
}

func main() {
	var all []source
	seen := map[uint64]bool{}
	group, files := "core", map[string]int{}
	for _, arg := range os.Args[1:] {
		if arg == "core" || arg == "wide" {
			group = arg
			continue
		}
		licence := licenceOf(arg)
		if licence == "" {
			fmt.Fprintln(os.Stderr, "left out, no permissive licence found:", arg)
			continue
		}
		before, size := len(all), 0
		all = append(all, walk(arg, group, seen)...)
		for _, s := range all[before:] {
			size += len(s.file.Text)
		}
		files[group] += len(all) - before
		fmt.Fprintf(os.Stderr, "%s\t%s\t%s\t%d files\t%d KiB\n", group, licence, filepath.Base(filepath.Dir(arg))+"/"+filepath.Base(arg), len(all)-before, size>>10)
	}
	markNear(all)
	out := bufio.NewWriterSize(os.Stdout, 1<<20)
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	chats := 0
	for _, s := range all {
		must(enc.Encode(s.file))
		for _, c := range s.chats {
			must(enc.Encode(c))
		}
		chats += len(s.chats)
	}
	must(out.Flush())
	fmt.Fprintln(os.Stderr, "files", files, "chats", chats)
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// licenceOf names the permissive licence in dir or the folder above it, or is empty.
func licenceOf(dir string) string {
	for _, d := range []string{dir, filepath.Dir(dir)} {
		for _, name := range []string{"LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING", "License", "license.txt"} {
			b, err := os.ReadFile(filepath.Join(d, name))
			if err != nil {
				continue
			}
			t := strings.Join(strings.Fields(string(b)), " ")
			head := t[:min(len(t), 3000)]
			switch {
			case strings.Contains(head, "GNU ") || strings.Contains(head, "Mozilla Public") || strings.Contains(head, "Business Source"):
				return ""
			case strings.Contains(t, "Apache License"):
				return "Apache-2.0"
			case strings.Contains(t, "Redistribution and use in source and binary forms"):
				return "BSD"
			case strings.Contains(t, "Permission is hereby granted, free of charge"):
				return "MIT"
			case strings.Contains(t, "Permission to use, copy, modify, and"):
				return "ISC"
			}
			return ""
		}
	}
	return ""
}

var skipped = regexp.MustCompile(`^(testdata|vendor|third_party|_asm|corpus|rewrite|internal_gengo|node_modules|fakes?|mocks?|gen|generated|applyconfigurations|informers|listers)$`)

func walk(root, group string, seen map[uint64]bool) []source {
	var out []source
	filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if d.IsDir() {
			n := d.Name()
			core := n == "testdata" || n == "vendor" || n == "_asm" || n == "corpus" || n == "rewrite"
			if p != root && (core || group == "wide" && skipped.MatchString(n)) {
				return filepath.SkipDir
			}
			return nil
		}
		if s, ok := take(root, p, group, seen); ok {
			out = append(out, s)
		}
		return nil
	})
	return out
}

// take reads a file and refuses generated ones, tables, and copies of what was taken before.
func take(root, p, group string, seen map[uint64]bool) (source, bool) {
	if !strings.HasSuffix(p, ".go") || group == "wide" && (strings.HasSuffix(p, "_test.go") || strings.HasSuffix(p, ".pb.go")) {
		return source{}, false
	}
	b, err := os.ReadFile(p)
	if err != nil || len(b) > maxFile || len(b) < minFile || group == "wide" && len(b) > maxWideFile {
		return source{}, false
	}
	head := b[:min(len(b), 1500)]
	if bytes.Contains(head, []byte("DO NOT EDIT")) || bytes.Contains(head, []byte("GNU General Public")) || bytes.Contains(head, []byte("Business Source")) {
		return source{}, false
	}
	long, digits := 0, 0
	for l := range bytes.SplitSeq(b, []byte("\n")) {
		if len(l) > longLine {
			long++
		}
	}
	for _, c := range b {
		if c >= '0' && c <= '9' {
			digits++
		}
	}
	if long > maxLong || digits*8 > len(b) {
		return source{}, false
	}
	text := string(b)
	if i := strings.Index(text, "\n\n"); i > 0 && i < 2000 && (strings.HasPrefix(text, "//") || strings.HasPrefix(text, "/*")) && strings.Contains(text[:i], "opyright") {
		text = text[i+2:]
	}
	key := hash(strings.Join(strings.Fields(text), " "))
	if seen[key] {
		return source{}, false
	}
	seen[key] = true
	rel, _ := filepath.Rel(root, p)
	s := source{file: record{Kind: "f", Path: rel, Group: group, Text: text}}
	s.chats = chats(rel, group, text)
	return s, true
}

func hash(s string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(s))
	return h.Sum64()
}

// chats makes conversations from a file's documented functions: mostly "write it", some "complete it", "document it",
// a tool's answer explained, and a function found again in the file.
func chats(rel, group, text string) []record {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, rel, text, parser.ParseComments)
	if err != nil {
		return nil
	}
	var out []record
	add := func(m ...[2]string) { out = append(out, record{Kind: "c", Path: rel, Group: group, Chat: m}) }
	pkg := f.Name.Name
	funcs := 0
	for _, decl := range f.Decls {
		fd, ok := decl.(*ast.FuncDecl)
		if !ok || fd.Body == nil {
			continue
		}
		start, end := fset.Position(fd.Pos()).Offset, fset.Position(fd.End()).Offset
		if end-start < minFunc || end-start > maxFunc {
			continue
		}
		funcs++
		code := text[start:end]
		sig := strings.TrimSpace(text[start:fset.Position(fd.Body.Pos()).Offset])
		h := hash(rel + "\x00" + sig)
		if funcs > 2 && h%(retrievalOneInFile*4) == 1 && len(text) > minRetrieval && len(text) < maxRetrieval {
			add([2]string{"user", text + "\nRepeat " + fd.Name.Name + " from the file above."}, [2]string{"assistant", code})
		}
		if fd.Doc == nil {
			continue
		}
		doc := strings.TrimSpace(fd.Doc.Text())
		if len(doc) < minDoc || len(doc) > maxDoc || strings.Contains(doc, "go:") || group == "wide" && h/64%chatOneInWide != 0 {
			continue
		}
		switch lines := strings.Split(code, "\n"); {
		case h%10 < 6:
			add([2]string{"user", fmt.Sprintf("Write %s in package %s.\n%s", sig, pkg, doc)}, [2]string{"assistant", code})
		case h%10 == 6:
			add([2]string{"user", "Document this function.\n" + code}, [2]string{"assistant", "// " + strings.ReplaceAll(doc, "\n", "\n// ")})
		case h%10 == 7 && len(lines) >= completeFromLines:
			add([2]string{"user", "Complete this function.\n" + strings.Join(lines[:len(lines)/2], "\n")}, [2]string{"assistant", code})
		case h%10 == 8:
			add([2]string{"system", "You write Go. Tools: read(path, symbol)."},
				[2]string{"user", fmt.Sprintf("What does %s in %s do?", fd.Name.Name, rel)},
				[2]string{"assistant", fmt.Sprintf(`{"tool":"read","path":%q,"symbol":%q}`, rel, fd.Name.Name)},
				[2]string{"tool", code}, [2]string{"assistant", doc})
		case h%10 == 9:
			add([2]string{"system", "You write Go."}, [2]string{"user", fmt.Sprintf("Write a function %s in package %s: %s", fd.Name.Name, pkg, doc)}, [2]string{"assistant", code})
		}
	}
	return out
}

func heldOut(path string) bool { return crc32.ChecksumIEEE([]byte(path))%heldOutOneIn == 0 }

// windows calls f with a hash of every run of windowLines non-blank lines.
func windows(text string, f func(uint64)) {
	var last []string
	for l := range strings.SplitSeq(text, "\n") {
		if l = strings.TrimSpace(l); l == "" {
			continue
		}
		if last = append(last, l); len(last) > windowLines {
			last = last[1:]
		}
		if len(last) == windowLines {
			f(hash(strings.Join(last, "\n")))
		}
	}
}

// markNear sets Near of the held-out files.
func markNear(all []source) {
	found := map[uint64]bool{}
	for _, s := range all {
		if heldOut(s.file.Path) {
			windows(s.file.Text, func(h uint64) { found[h] = false })
		}
	}
	for _, s := range all {
		if !heldOut(s.file.Path) {
			windows(s.file.Text, func(h uint64) {
				if _, ok := found[h]; ok {
					found[h] = true
				}
			})
		}
	}
	for i := range all {
		if s := &all[i]; heldOut(s.file.Path) {
			n, near := 0, 0
			windows(s.file.Text, func(h uint64) {
				n++
				if found[h] {
					near++
				}
			})
			if n > 0 {
				s.file.Near = float64(near*100/n) / 100
			}
			for j := range s.chats {
				s.chats[j].Near = s.file.Near
			}
		}
	}
}
