/* The earlier places of a sequence's last tokens, for all rows of a round in one call: see
 * specdist/policies/ngrams/ngram_index.py. tests/policies/ngrams/plain_ngrams.py has the same written out; tests hold the two
 * equal.
 *
 * A slot's tokens lie in a row of their own. Positions that end in the same two tokens are chained, the latest
 * first: `heads` has the latest one by a hash of the two tokens, `earlier` the one before each. */
#include <stdint.h>

/* Tokens of other texts, each text after a NO_TOKEN, in a ring: position p lies at p % capacity, and the first
 * of `count` - capacity tokens are overwritten. Positions that end in the same STORE_GRAM tokens are chained.
 * A sequence that runs adds its tokens to blocks of its own; `earlier` of the NO_TOKEN after a full one is
 * where the text goes on. */
#define STORE_GRAM 4
#define STORE_BLOCK 64
#define STORE_OVERLAP 8
#define NO_TOKEN (-1)
typedef struct {
    int64_t capacity, num_head_bits;
    int64_t *count;                            /* [1] */
    int32_t *tokens, *owners;                  /* [capacity] */
    int64_t *earlier, *heads;                  /* [capacity], [2 ** num_head_bits] */
} Store;

typedef struct {
    int64_t capacity, num_head_bits, num_classes, max_match, max_places;
    const int64_t *class_of;                   /* [max_match + 1] */
    const double *prior_right;                 /* [num_classes] */
    double prior_tried;
    int32_t *tokens, *earlier, *heads;         /* [slots][capacity] twice, [slots][2 ** num_head_bits] */
    int64_t *num_tokens, *num_prompt_tokens;   /* [slots], as the next two */
    int64_t *match_places, *match_lengths;
    double *num_right, *num_tried;             /* [slots][2 * num_classes]: own text, then the store's */
    const Store *store;                        /* or NULL */
    int64_t *store_places, *store_lengths;     /* [slots], as the next three */
    int64_t *num_unstored, *store_tails, *owners;
    int64_t adds_sequences;
} Ngrams;

static int32_t token_at(const Store *store, int64_t place) { return store->tokens[place % store->capacity]; }

static int64_t gram_hash(const int32_t *last, int64_t num_bits) { /* of the tokens that end at `last` */
    uint64_t word = 0;
    for (int64_t back = STORE_GRAM - 1; back >= 0; back--)
        word = (word ^ (uint64_t)(uint32_t)last[-back]) * 0x9E3779B97F4A7C15ull;
    return (int64_t)(word >> (64 - num_bits));
}

static int is_kept(const Store *store, int64_t place) { return place > *store->count - store->capacity; }

/* Where the text goes on after a place, or -1. */
static int64_t next_place(const Store *store, int64_t place) {
    if (++place >= *store->count) return -1;
    if (token_at(store, place) == NO_TOKEN) place = store->earlier[place % store->capacity];
    return place >= 0 && is_kept(store, place) ? place : -1;
}

static void put(const Store *store, int64_t place, int32_t token, int32_t owner) {
    store->tokens[place % store->capacity] = token;
    store->owners[place % store->capacity] = owner;
    store->earlier[place % store->capacity] = -1;
}

/* Adds a place to the chain of the tokens that end at `last`. */
static void chain(const Store *store, int64_t place, const int32_t *last) {
    int64_t *head = store->heads + gram_hash(last, store->num_head_bits);
    store->earlier[place % store->capacity] = *head;
    *head = place;
}

/* Adds a text of no sequence that runs. */
void add_text(const Store *store, int64_t num_tokens, const int32_t *text) {
    for (int64_t index = -1; index < num_tokens; index++) {
        int64_t place = (*store->count)++;
        put(store, place, index < 0 ? NO_TOKEN : text[index], 0);
        if (index + 1 >= STORE_GRAM) chain(store, place, text + index);
    }
}

/* Adds the token at `last` of a sequence that runs, which has so many before it. */
static void add_token(const Ngrams *index, int64_t slot, const int32_t *last, int64_t num_before) {
    const Store *store = index->store;
    int64_t place = index->store_tails[slot];
    int32_t owner = (int32_t)index->owners[slot];
    /* The last place of a block stays a NO_TOKEN. */
    if (place < 0 || !is_kept(store, place) || place % STORE_BLOCK == STORE_BLOCK - 1) {
        int64_t begin = *store->count + (STORE_BLOCK - *store->count % STORE_BLOCK) % STORE_BLOCK;
        while (*store->count < begin + STORE_BLOCK) put(store, (*store->count)++, NO_TOKEN, owner);
        int64_t overlap = num_before < STORE_OVERLAP ? num_before : STORE_OVERLAP;
        for (int64_t back = overlap; back > 0; back--) put(store, begin + 1 + overlap - back, last[-back], owner);
        int is_linked = place >= 0 && is_kept(store, place);
        if (is_linked) store->earlier[place % store->capacity] = begin + 1 + overlap;
        place = begin + 1 + overlap;
        /* What the first tokens come after: the end of the prompt. */
        if (!is_linked && num_before >= STORE_GRAM) chain(store, place - 1, last - 1);
    }
    put(store, place, *last, owner);
    if (num_before + 1 >= STORE_GRAM) chain(store, place, last);
    index->store_tails[slot] = place + 1;
}

/* The longest match in the store of the tokens that end at `last`, the latest of equal ones. */
static void find_in_store(const Ngrams *index, int64_t slot, const int32_t *last, int64_t num_before) {
    const Store *store = index->store;
    int64_t best_place = -1, best_length = 0, num_places = 0;
    int64_t first = *store->count - store->capacity + index->max_match;
    int64_t place = num_before + 1 < STORE_GRAM ? -1 : store->heads[gram_hash(last, store->num_head_bits)];
    for (; place >= 0 && place >= first && num_places < index->max_places;
         place = store->earlier[place % store->capacity]) {
        int64_t length = 0;
        while (length < index->max_match && length <= num_before && length <= place
               && token_at(store, place - length) == last[-length])
            length++;
        if (length < STORE_GRAM) continue; /* another hash */
        num_places++;
        if (length <= best_length) continue;
        if (store->owners[place % store->capacity] == index->owners[slot]) continue; /* its own text */
        if (next_place(store, place) >= 0) {
            best_place = place;
            best_length = length;
        }
        if (length == index->max_match) break;
    }
    index->store_places[slot] = best_place;
    index->store_lengths[slot] = best_length;
}

/* What the store predicted is compared with the token at `last`; then the next prediction is looked up. */
static void follow_store(const Ngrams *index, int64_t slot, const int32_t *last, int64_t num_before,
                         int is_output, int is_asked) {
    const Store *store = index->store;
    int64_t place = index->store_places[slot], length = index->store_lengths[slot];
    int64_t next = place >= 0 && is_kept(store, place - index->max_match) ? next_place(store, place) : -1;
    int is_right = next >= 0 && token_at(store, next) == *last;
    if (is_output && place >= 0) {
        int64_t class = (2 * slot + 1) * index->num_classes + index->class_of[length];
        index->num_right[class] += is_right;
        index->num_tried[class] += 1;
    }
    index->store_places[slot] = -1;
    index->store_lengths[slot] = 0;
    if (is_right && next_place(store, next) >= 0) {
        index->store_places[slot] = next;
        index->store_lengths[slot] = length < index->max_match ? length + 1 : length;
    } else if (is_asked) {
        find_in_store(index, slot, last, num_before);
    }
}

static int64_t hash_of(int32_t before, int32_t last, int64_t num_bits) {
    uint64_t word = ((uint64_t)(uint32_t)before << 32) | (uint32_t)last;
    return (int64_t)((word * 0x9E3779B97F4A7C15ull) >> (64 - num_bits));
}

/* The longest match of the tokens up to `last`, which is not yet in the chain that begins at `place`. */
static void find(const Ngrams *index, int64_t slot, int64_t last, int32_t place) {
    const int32_t *tokens = index->tokens + slot * index->capacity;
    const int32_t *earlier = index->earlier + slot * index->capacity;
    int64_t best_place = -1, best_length = 0, num_places = 0;
    for (; place >= 0 && num_places < index->max_places; place = earlier[place]) {
        if (tokens[place] != tokens[last] || tokens[place - 1] != tokens[last - 1]) continue; /* another hash */
        num_places++;
        int64_t length = 2;
        while (length < index->max_match && length <= place && tokens[place - length] == tokens[last - length])
            length++;
        if (length > best_length) {
            best_place = place;
            best_length = length;
        }
        if (length == index->max_match) break;
    }
    index->match_places[slot] = best_place;
    index->match_lengths[slot] = best_length;
}

void append_tokens(const Ngrams *index, int64_t num_rows, const int64_t *slots, const int64_t *counts,
                   const int32_t *new_tokens) {
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = slots[row], position = index->num_tokens[slot];
        int64_t num_prompt_tokens = index->num_prompt_tokens[slot], end = position + counts[row];
        int32_t *tokens = index->tokens + slot * index->capacity;
        int32_t *earlier = index->earlier + slot * index->capacity;
        int32_t *heads = index->heads + (slot << index->num_head_bits);
        for (; position < end; position++) {
            int32_t token = *new_tokens++;
            int64_t place = index->match_places[slot];
            if (position >= num_prompt_tokens && place >= 0) {
                int64_t class = 2 * slot * index->num_classes + index->class_of[index->match_lengths[slot]];
                index->num_right[class] += tokens[place + 1] == token;
                index->num_tried[class] += 1;
            }
            tokens[position] = token;
            index->match_places[slot] = -1;
            index->match_lengths[slot] = 0;
            int is_asked = position + 1 == end || position + 1 >= num_prompt_tokens;
            if (index->store)
                follow_store(index, slot, tokens + position, position, position >= num_prompt_tokens, is_asked);
            if (index->adds_sequences && position >= index->num_unstored[slot])
                add_token(index, slot, tokens + position, position);
            if (position == 0) continue;
            int32_t *head = heads + hash_of(tokens[position - 1], token, index->num_head_bits);
            if (is_asked) find(index, slot, position, *head);
            earlier[position] = *head;
            *head = (int32_t)position;
        }
        index->num_tokens[slot] = end;
    }
}

static double rate_of(const Ngrams *index, int64_t slot, int is_store, int64_t length) {
    int64_t class = index->class_of[length < index->max_match ? length : index->max_match];
    int64_t counted = (2 * slot + is_store) * index->num_classes + class;
    class += is_store * index->num_classes;
    return (index->num_right[counted] + index->prior_right[class]) / (index->num_tried[counted] + index->prior_tried);
}

/* How many tokens a row's own text, or the store, proposes, and the sum of their chances; they are written
 * where `proposed` is not NULL. */
static int64_t read_on(const Ngrams *index, int64_t slot, int is_store, int64_t limit, double least_chance,
                       int64_t *proposed, double *chances, double *worth) {
    const Store *store = index->store;
    int64_t place = is_store ? index->store_places[slot] : index->match_places[slot];
    int64_t length = is_store ? index->store_lengths[slot] : index->match_lengths[slot], depth = 0;
    *worth = 0;
    if (place < 0) return 0;
    const int32_t *tokens = index->tokens + slot * index->capacity;
    int64_t period = index->num_tokens[slot] - 1 - place, next = place;
    double chance = 1;
    for (; depth < limit; depth++) {
        if (is_store) {
            next = depth || is_kept(store, place) ? next_place(store, next) : -1;
            if (next < 0) break;
        }
        chance *= rate_of(index, slot, is_store, length + depth);
        if (chance < least_chance) break;
        *worth += chance;
        if (proposed) {
            proposed[depth] = is_store ? token_at(store, next) : tokens[place + 1 + depth % period];
            chances[depth] = chance;
        }
    }
    return depth;
}

/* Returns the number of tokens proposed for all rows, which lie one after the other in `proposed`. The source
 * of which more tokens are expected to be right proposes: the row's own text, or the store. */
int64_t propose_tokens(const Ngrams *index, int64_t num_rows, const int64_t *slots, const int64_t *limits,
                       const double *least_chances, int64_t *proposed, double *chances, int64_t *lengths) {
    int64_t total = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int is_store = 0;
        double own = 0, other = 0;
        if (index->store && index->store_places[slots[row]] >= 0) {
            read_on(index, slots[row], 0, limits[row], least_chances[row], 0, 0, &own);
            read_on(index, slots[row], 1, limits[row], least_chances[row], 0, 0, &other);
            is_store = other > own;
        }
        lengths[row] = read_on(index, slots[row], is_store, limits[row], least_chances[row], proposed + total,
                               chances + total, &own);
        total += lengths[row];
    }
    return total;
}
