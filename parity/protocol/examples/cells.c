/* A scheduler that places cells itself, in C without a library: cc -O2 -o cells cells.c
 *
 * First come, first served; each session's whole need is kept free, so nobody has to give way; no prefix cache.
 * In `unified` a session's cells increase with its positions: a row goes into the lowest cell above the session's
 * last one that nobody uses. The engine takes the lowest empty cells, so cells of ended sessions stay occupied
 * under their old sequence id and are removed exactly when a row is placed into them.
 * `--off-by-one` plants a fault: one row goes into the cell below the one where its session's order demands it. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- JSON: as much of it as the messages need. Values live until the next line. */

typedef struct Value { char kind; double number; char *text; struct Value *key, *child, *next; } Value;

static Value pool[1 << 20];
static int pool_used;
static char *at;

static void *need(void *memory) { if (!memory) { fputs("out of memory\n", stderr); exit(1); } return memory; }

static void fail(const char *why) { fprintf(stderr, "cells: %s\n", why); exit(1); }

static Value *make(char kind) {
    if (pool_used == (int)(sizeof pool / sizeof *pool)) fail("message too long");
    Value *value = &pool[pool_used++];
    memset(value, 0, sizeof *value);
    value->kind = kind;
    return value;
}

static void space(void) { while (*at && strchr(" \t\r\n,:", *at)) at++; }

static Value *parse(void) {
    space();
    if (*at == '{' || *at == '[') {
        char close = *at == '{' ? '}' : ']';
        Value *value = make(*at++), **tail = &value->child;
        for (space(); *at != close; space()) {
            if (!*at) fail("line ends within a value");
            Value *key = close == '}' ? parse() : NULL;
            *tail = parse();
            (*tail)->key = key;
            tail = &(*tail)->next;
        }
        at++;
        return value;
    }
    if (*at == '"') { /* names and states: escapes are kept as they are */
        Value *value = make('"');
        value->text = ++at;
        while (*at && *at != '"') at += *at == '\\' && at[1] ? 2 : 1;
        if (*at) *at++ = 0;
        return value;
    }
    if (!strncmp(at, "null", 4) || !strncmp(at, "true", 4)) { Value *value = make(*at); at += 4; return value; }
    if (!strncmp(at, "false", 5)) { at += 5; return make('f'); }
    char *end;
    Value *value = make('0');
    value->number = strtod(at, &end);
    if (end == at) fail("no JSON");
    at = end;
    return value;
}

static Value *get(Value *object, const char *key) {
    for (Value *v = object->child; v; v = v->next)
        if (v->key && !strcmp(v->key->text, key)) return v;
    fprintf(stderr, "cells: no key %s\n", key);
    exit(1);
}

static int num(Value *object, const char *key) { return (int)get(object, key)->number; }

/* -- text that grows */

typedef struct { char *text; size_t used, size; } Text;

static void add(Text *out, const char *format, ...) {
    for (;;) {
        va_list list;
        va_start(list, format);
        int count = vsnprintf(out->text + out->used, out->size - out->used, format, list);
        va_end(list);
        if ((size_t)count < out->size - out->used) { out->used += count; return; }
        out->text = need(realloc(out->text, out->size = 2 * out->size + count + 1));
    }
}

static void clear(Text *out) { if (!out->text) out->text = need(malloc(out->size = 4096)); out->used = 0; *out->text = 0; }

/* -- the pool. cell_seq[c]: whose id keeps cell c (-1: empty), cell_live[c]: does its session still use it. */

enum { UNIFIED, STREAMS, STOCK };
static int layout, num_cells, num_sequences, recurrent, width, pads, primed, first;
static int max_tokens, max_seqs, max_chunk, max_waiting, off_by_one;
static int *cell_seq, *cell_pos, *cell_live, *cell_next; /* cell_next: taken in the step that is being planned */
static int *seq_cells, *seq_live;                        /* per id: cells that it keeps, is its session live */
static Text ops;                                         /* operations for the next call */

typedef struct Session {
    char *name;
    int num_rows, rows, seq, last; /* rows it has, its id (-1: none), its highest cell */
    struct Session *next;
} Session;
static Session *sessions; /* in order of submission */

static void op(const char *kind, int seq, int start, int stop) {
    add(&ops, "%s{\"kind\":\"%s\",\"seq_id\":%d,\"start\":%d,\"stop\":%d,\"source\":-1}", ops.used ? "," : "", kind, seq, start, stop);
}

static void empty(void) { /* back to the empty pool */
    for (int c = 0; c < num_cells + first; c++) cell_seq[c] = -1, cell_live[c] = 0;
    for (int s = 0; s < num_sequences; s++) seq_cells[s] = seq_live[s] = 0;
    primed = !pads;
    clear(&ops);
    op("clear", -1, -1, -1);
}

static int available(void) {
    int count = 0;
    if (layout == STOCK) {
        for (Session *s = sessions; s; s = s->next) count += s->seq >= 0 ? s->rows : 0;
        return num_cells - count;
    }
    for (int c = first; c < num_cells + first; c++) count += !cell_live[c];
    return count;
}

static void release(Session *s) {
    if (s->seq < 0) return;
    seq_live[s->seq] = 0;
    if (layout != UNIFIED) op("remove", s->seq, -1, -1);
    else {
        if (recurrent) op("drop_state", s->seq, -1, -1);
        for (int c = first; c < num_cells + first; c++) if (cell_seq[c] == s->seq) cell_live[c] = 0;
    }
    s->seq = -1, s->rows = 0, s->last = -1;
}

static Session *find(const char *name) {
    for (Session *s = sessions; s; s = s->next) if (!strcmp(s->name, name)) return s;
    return NULL;
}

static void forget(const char *name) {
    for (Session **link = &sessions; *link; link = &(*link)->next)
        if (!strcmp((*link)->name, name)) {
            Session *gone = *link;
            release(gone);
            *link = gone->next;
            free(gone->name);
            free(gone);
            return;
        }
}

/* -- a step */

typedef struct { int cell, row, seq; } Place;
static Place *places;
static Text chunks, calls;

static int by_cell(const void *a, const void *b) { return ((Place *)a)->cell - ((Place *)b)->cell; }

static void call(Place *p, int count) {
    Text rows = {0}, seqs = {0}, cells = {0};
    clear(&rows), clear(&seqs), clear(&cells);
    for (int i = 0; i < count && layout == UNIFIED; i++) {
        int c = p[i].cell, old = cell_seq[c];
        if (old >= 0) { op("remove", old, cell_pos[c], cell_pos[c] + 1); seq_cells[old]--; }
    }
    int lone = count == 1 && pads;
    if (lone) { op("remove", 0, -1, -1); add(&rows, "-1,"); add(&seqs, "0,"); add(&cells, "0,"); }
    for (int i = 0; i < count; i++) {
        add(&rows, "%s%d", i ? "," : "", p[i].row);
        add(&seqs, "%s%d", i ? "," : "", p[i].seq);
        add(&cells, "%s%d", i ? "," : "", layout == UNIFIED ? p[i].cell : -1);
    }
    add(&calls, "%s{\"ops\":[%s],\"rows\":[%s],\"seq_ids\":[%s],\"cells\":[%s]}", calls.used ? "," : "", ops.used ? ops.text : "", rows.text, seqs.text, cells.text);
    clear(&ops);
    free(rows.text), free(seqs.text), free(cells.text);
}

/* Calls of at most `width` rows; none of a single row at the end where there is company. */
static void split(Place *p, int count) {
    if (layout == UNIFIED) qsort(p, count, sizeof *p, by_cell);
    while (count > 0) {
        int size = count < width ? count : width;
        if (count - size == 1 && width > 2) size--;
        call(p, size);
        p += size, count -= size;
    }
}

static int lowest_above(int cell) {
    for (int c = cell + 1 > first ? cell + 1 : first; c < num_cells + first; c++)
        if (!cell_live[c] && !cell_next[c]) return c;
    fail("no cell, although the whole need is kept free");
    return -1;
}

static void plan(Value *question) {
    int tokens = max_tokens, seats = max_seqs, running = 0, reserved = 0, row = 0, singles = 0, count = 0;
    struct { Session *s; Value *live; int length, from; } step[4096];
    int planned = 0;
    clear(&chunks), clear(&calls);
    for (int pass = 0; pass < 3; pass++) { /* decodes, prompts that have begun, those who wait */
        for (Value *live = get(question, "sessions")->child; live; live = live->next) {
            Session *s = find(get(live, "session")->text);
            int start = num(live, "computed"), until = num(live, "until"), enters = s->seq < 0;
            if (pass == 0 && !enters) { running++; reserved += s->num_rows - s->rows; }
            int own = enters ? 2 : until - start > 1 ? 1 : 0;
            if (own != pass || planned >= 4096) continue;
            int length = until - start < tokens ? until - start : tokens;
            if (length > max_chunk) length = max_chunk;
            if (length < 1) continue;
            if (enters) {
                int id = first, room = layout == STREAMS ? num_cells / num_sequences : available() - reserved;
                while (id < num_sequences && (seq_live[id] || seq_cells[id])) id++;
                if (id == num_sequences || running >= seats || s->num_rows > room) break; /* nobody overtakes */
                s->seq = id, s->rows = 0, s->last = -1;
                seq_live[id] = 1;
                running++;
                reserved += s->num_rows;
            }
            step[planned].s = s, step[planned].live = live, step[planned].length = length, step[planned].from = row;
            add(&chunks, "%s{\"session\":\"%s\",\"start\":%d,\"stop\":%d}", planned ? "," : "", s->name, start, start + length);
            planned++, row += length, tokens -= length;
        }
    }
    places = need(realloc(places, (row + 1) * sizeof *places));
    /* A recurrent context cuts a call into groups of equal length, so single rows go together, pieces alone. */
    int grouped = recurrent && layout == UNIFIED;
    if (planned && !primed) {
        add(&calls, "{\"ops\":[%s],\"rows\":[-1],\"seq_ids\":[0],\"cells\":[0]}", ops.text);
        clear(&ops);
        primed = 1;
    }
    memset(cell_next, 0, (num_cells + first) * sizeof *cell_next);
    for (int pass = 0; pass < (grouped ? 2 : 1); pass++) {
        for (int i = 0; i < planned; i++) {
            Session *s = step[i].s;
            if (grouped && (step[i].length > 1) != pass) continue;
            for (int k = 0; k < step[i].length; k++) {
                Place p = {-1, step[i].from + k, s->seq};
                if (layout == UNIFIED) {
                    p.cell = lowest_above(off_by_one && s->rows + k > 8 ? first - 1 : s->last);
                    if (p.cell > s->last) s->last = p.cell;
                    cell_next[p.cell] = 1;
                }
                places[count++] = p;
            }
            if (off_by_one && layout != UNIFIED && step[i].length > 1) { /* no order to break: two rows change places */
                int other = places[count - 1].row;
                places[count - 1].row = places[count - 2].row, places[count - 2].row = other;
            }
            if (grouped && pass == 0) singles = count;
            if (grouped && pass == 1) split(places + count - step[i].length, step[i].length);
        }
        if (grouped && pass == 0) split(places, singles);
    }
    if (!grouped) split(places, count);
    for (int i = 0; i < planned; i++) { /* what was placed is the sessions' now */
        Session *s = step[i].s;
        for (int k = 0; k < count; k++) {
            if (layout != UNIFIED || places[k].seq != s->seq) continue;
            int c = places[k].cell, at_row = places[k].row - step[i].from;
            cell_seq[c] = s->seq, cell_live[c] = 1, cell_pos[c] = s->rows + at_row;
            seq_cells[s->seq]++;
        }
        s->rows += step[i].length;
    }
    printf("{\"type\":\"planned\",\"chunks\":[%s],\"calls\":[%s%s%s]}\n", chunks.text, planned ? "[" : "", calls.text, planned ? "]" : "");
}

/* -- the conversation */

static void answer(void) {
    int idle = 1;
    for (Session *s = sessions; s; s = s->next) idle &= s->seq < 0;
    if (idle) empty(); /* nobody's rows are in the pool: begin anew */
    if (sessions) printf("{\"type\":\"answer\"}\n"); /* operations wait for the next call */
    else printf("{\"type\":\"answer\",\"operations\":[[%s]]}\n", ops.used ? ops.text : "");
}

static void hello(Value *message) {
    Value *limits = get(message, "pools")->child, *steps = get(message, "steps");
    const char *name = get(limits, "layout")->text;
    layout = !strcmp(name, "unified") ? UNIFIED : !strcmp(name, "streams") ? STREAMS : STOCK;
    num_cells = num(limits, "num_cells"), num_sequences = num(limits, "num_sequences");
    recurrent = get(limits, "recurrent")->kind == 't', width = num(limits, "max_call_rows");
    pads = layout == UNIFIED && get(limits, "pad_lone_rows")->kind == 't';
    first = pads; /* cell 0 and id 0 belong to padding rows */
    max_tokens = num(steps, "max_num_batched_tokens"), max_seqs = num(steps, "max_num_seqs");
    max_chunk = num(steps, "max_chunk_tokens"), max_waiting = num(steps, "max_waiting");
    int size = num_cells + 1;
    cell_seq = need(calloc(size, sizeof(int))), cell_pos = need(calloc(size, sizeof(int)));
    cell_live = need(calloc(size, sizeof(int))), cell_next = need(calloc(size, sizeof(int)));
    seq_cells = need(calloc(num_sequences, sizeof(int))), seq_live = need(calloc(num_sequences, sizeof(int)));
    empty();
    printf("{\"type\":\"ready\",\"protocol\":1,\"name\":\"cells.c\",\"level\":\"cells\",\"prefix_cache\":false,\"one_context\":true}\n");
}

static void submit(Value *message) {
    int prompt = 0, waiting = 0, most = layout == STREAMS ? num_cells / num_sequences : num_cells;
    for (Value *v = get(message, "prompt")->child; v; v = v->next) prompt++;
    int rows = prompt + num(message, "max_tokens") - 1;
    for (Session *s = sessions; s; s = s->next) waiting += s->seq < 0;
    if (rows > most || waiting >= max_waiting) {
        printf("{\"type\":\"answer\",\"accepted\":false,\"reason\":\"%s\",\"retryable\":%s}\n",
               rows > most ? "an empty pool is too small for it" : "the queue is full", rows > most ? "false" : "true");
        return;
    }
    Session *s = need(calloc(1, sizeof *s)), **tail = &sessions;
    s->name = need(strdup(get(message, "session")->text)), s->num_rows = rows, s->seq = s->last = -1;
    while (*tail) tail = &(*tail)->next;
    *tail = s;
    printf("{\"type\":\"answer\"}\n");
}

int main(int count, char **options) {
    char *line = NULL;
    size_t size = 0;
    off_by_one = count > 1 && !strcmp(options[1], "--off-by-one");
    while (getline(&line, &size, stdin) > 0) {
        pool_used = 0, at = line;
        Value *message = parse();
        const char *type = get(message, "type")->text;
        if (!strcmp(type, "hello")) hello(message);
        else if (!strcmp(type, "submit")) submit(message);
        else if (!strcmp(type, "plan")) plan(message);
        else {
            if (!strcmp(type, "cancel")) forget(get(message, "session")->text);
            else if (!strcmp(type, "preempt")) release(need(find(get(message, "session")->text)));
            else if (!strcmp(type, "failed")) { for (Session *s = sessions; s; s = s->next) s->seq = s->last = -1, s->rows = 0; empty(); }
            if (!strcmp(type, "result") || !strcmp(type, "failed"))
                for (Value *v = get(message, "ended")->child; v; v = v->next) forget(v->text);
            answer();
        }
        fflush(stdout);
    }
    return 0;
}
