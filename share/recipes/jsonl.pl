# SPDX-License-Identifier: Apache-2.0
# jsonl.pl -- where the "text" of a line of JSONL stands.  Lines of any length: nothing here is matched by one
# expression that repeats a group, which Perl bounds.
use strict;
use warnings;

# text_at(\$line): the offsets of the first character and behind the last one of the string under "text", still
# with its escapes; the empty list if the object has none.
sub text_at {
    my $line = shift;
    my ($depth, $key, $value) = (0, '', 0);
    pos($$line) = 0;
    while ($$line =~ /\G[^"{}\[\],:]*([{}\[\],:"])/gc) {
        my $c = $1;
        if ($c eq '"') {
            my $from = pos $$line;
            while ($$line =~ /\G(?:[^"\\]+|\\.)/gcs) { }
            my $to = pos $$line;
            $$line =~ /\G"/gc or return;
            next if $depth != 1;
            return ($from, $to) if $value && $key eq 'text';
            $key = $value ? '' : substr $$line, $from, $to - $from;
        } else {
            $depth++ if $c eq '{' || $c eq '[';
            $depth-- if $c eq '}' || $c eq ']';
            $value = $c eq ':' if $depth == 1;
        }
    }
    return;
}

1;
