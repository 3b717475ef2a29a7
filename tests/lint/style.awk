# SPDX-License-Identifier: Apache-2.0
# style.awk -- finds phrases that are not plain technical English, in comments and strings of C sources, in comments
# and names of tests of scripts, and in the text of manual pages and Markdown; and options in strings of the library.
# Prints FILE:LINE: 'words': what to write instead.
#
#   awk -v table=tests/lint/style.txt -f tests/lint/style.awk FILE ...
#
# A line of the table is PATTERN, a tab, and the advice.  A pattern is an extended regular expression, matched
# against lower-case text in which each sequence of blanks is one blank, so that a phrase is found across the
# lines of a comment; blanks stand for the ends of words.
function load(   line, part) {
    while ((getline line < table) > 0)
        if (line !~ /^#/ && split(line, part, "\t") == 2) {
            pattern[++n] = part[1]
            advice[n] = part[2]
        }
    close(table)
}

# Report all matches in a text that began at line `at` of the file.
function check(text, at,   i, rest) {
    text = " " tolower(text) " "
    gsub(/[ \t]+/, " ", text)
    gsub(/ there (is|are|was|were) no /, " there exists no ", text) # the only good place for "is no"
    for (i = 1; i <= n; i++)
        for (rest = text; match(rest, pattern[i]); rest = substr(rest, RSTART + RLENGTH))
            printf "%s:%d: '%s': %s\n", FILENAME, at, strip(substr(rest, RSTART, RLENGTH)), advice[i]
}

function strip(s) {
    gsub(/^ +| +$/, "", s)
    return s
}

# A string of the library that holds an option: its messages name quantities, cmd/common/words.c has the options.
# Options of other programs are no exceptions of that rule: no table of ours has them.
function check_option(text) {
    if (FILENAME !~ /^(lib|kernels)\// || text ~ /^[a-z][a-z0-9]* = /) # formulas have minus signs
        return
    text = " " text " "
    gsub(/ (tar|iconv|jq) -[a-z] /, " ", text)
    if (match(text, /[^a-z0-9-]--[a-z][a-z-]*|[ (]-[a-zA-Z][ ,.;:)]/))
        printf "%s:%d: '%s': name the quantity, and its option in cmd/common/words.c\n", FILENAME, FNR,
            strip(substr(text, RSTART, RLENGTH))
}

# One line of C: text of comments goes to `comment` until its end, each string is checked alone.
function c_line(line,   i, c, string) {
    for (i = 1; i <= length(line); i++) {
        c = substr(line, i, 1)
        if (inside) {
            if (substr(line, i, 2) == "*/") {
                check(comment, from)
                inside = 0
                i++
            } else
                comment = comment c
        } else if (substr(line, i, 2) == "/*") {
            inside = 1
            comment = ""
            from = FNR
            i++
        } else if (substr(line, i, 2) == "//") {
            check(substr(line, i + 2), FNR)
            return
        } else if (c == "\"") {
            string = ""
            for (i++; i <= length(line) && (c = substr(line, i, 1)) != "\""; i++) {
                if (c == "\\")
                    i++
                string = string (c == "\\" ? " " : c)
            }
            check(string, FNR)
            check_option(string)
        } else if (c == "'") {
            for (i++; i <= length(line) && (c = substr(line, i, 1)) != "'"; i++)
                if (c == "\\")
                    i++
        }
    }
    if (inside)
        comment = comment " "
}

# One line of a script: the text after a '#', and the name of a test.
function script_line(line) {
    if (match(line, /^@test "[^"]*"/))
        check(substr(line, RSTART + 7, RLENGTH - 8), FNR)
    else if (match(line, /(^|[ \t])#+ /))
        check(substr(line, RSTART + RLENGTH), FNR)
}

BEGIN { load() }
FNR == 1 {
    inside = 0
    c = FILENAME ~ /\.(c|h|cu|cuh|cpp)$/
    script = !c && FILENAME !~ /\.([157]|md)$/
}
script { script_line($0); next }
c { sub(/^ *\* /, inside ? " " : "&"); c_line($0); next }
!/^\.(\\"|Dd|Dt|Os|Sh|Bl|El|Bd|Ed|Pp|Xr|%)/ { sub(/^\.[A-Z][a-z] /, ""); check($0, FNR) }
