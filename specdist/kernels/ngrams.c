/* The earlier places of a sequence's last tokens: what specdist/drafters/plain_ngrams.py does, for all rows of
 * a round in one call. That file says what the results are; tests hold the two equal.
 *
 * A slot's tokens lie in a row of their own. Positions that end in the same two tokens are chained, the latest
 * first: `heads` has the latest one by a hash of the two tokens, `earlier` the one before each. */
#include <stdint.h>

/* Tokens of other texts, each text after a NO_TOKEN, in a ring: position p lies at p % capacity, and the first
 * of `count` - capacity tokens are overwritten. Positions that end in the same STORE_GRAM tokens are chained. */
#define STORE_GRAM 4
#define NO_TOKEN (-1)
typedef struct {
    int64_t capacity, num_head_bits;
    int64_t *count;                            /* [1] */
    int32_t *tokens;                           /* [capacity] */
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
    int64_t *store_places, *store_lengths;     /* [slots] */
} Ngrams;

static int32_t token_at(const Store *store, int64_t place) { return store->tokens[place % store->capacity]; }

static int64_t gram_hash(const int32_t *last, int64_t num_bits) { /* of the tokens that end at `last` */
    uint64_t word = 0;
    for (int64_t back = STORE_GRAM - 1; back >= 0; back--)
        word = (word ^ (uint64_t)(uint32_t)last[-back]) * 0x9E3779B97F4A7C15ull;
    return (int64_t)(word >> (64 - num_bits));
}

static int continues(const Store *store, int64_t place) {
    return place + 1 < *store->count && token_at(store, place + 1) != NO_TOKEN;
}

/* Adds a text. */
void add_text(const Store *store, int64_t num_tokens, const int32_t *text) {
    for (int64_t index = -1; index < num_tokens; index++) {
        int64_t place = (*store->count)++, slot = place % store->capacity;
        store->tokens[slot] = index < 0 ? NO_TOKEN : text[index];
        store->earlier[slot] = -1;
        if (index + 1 < STORE_GRAM) continue;
        int64_t *head = store->heads + gram_hash(text + index, store->num_head_bits);
        store->earlier[slot] = *head;
        *head = place;
    }
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
        if (length > best_length && continues(store, place)) {
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
    int is_right = place >= 0 && place > *store->count - store->capacity + index->max_match
                   && token_at(store, place + 1) == *last;
    if (is_output && place >= 0) {
        int64_t class = (2 * slot + 1) * index->num_classes + index->class_of[length];
        index->num_right[class] += is_right;
        index->num_tried[class] += 1;
    }
    index->store_places[slot] = -1;
    index->store_lengths[slot] = 0;
    if (is_right && continues(store, place + 1)) {
        index->store_places[slot] = place + 1;
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

/* Returns the number of tokens proposed for all rows, which lie one after the other in `proposed`. The source
 * whose next token is more likely proposes: the row's own text, or the store. */
int64_t propose_tokens(const Ngrams *index, int64_t num_rows, const int64_t *slots, const int64_t *limits,
                       const double *least_chances, int64_t *proposed, double *chances, int64_t *lengths) {
    int64_t total = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = slots[row], place = index->match_places[slot], length = index->match_lengths[slot], depth = 0;
        int is_store = 0;
        if (index->store && index->store_places[slot] >= 0) {
            is_store = place < 0
                       || rate_of(index, slot, 1, index->store_lengths[slot]) > rate_of(index, slot, 0, length);
            if (is_store) {
                place = index->store_places[slot];
                length = index->store_lengths[slot];
            }
        }
        if (place >= 0) {
            const int32_t *tokens = index->tokens + slot * index->capacity;
            int64_t period = index->num_tokens[slot] - 1 - place;
            double chance = 1;
            for (; depth < limits[row]; depth++) {
                if (is_store && (place + 1 + depth >= *index->store->count
                                 || place + 1 <= *index->store->count - index->store->capacity
                                 || token_at(index->store, place + 1 + depth) == NO_TOKEN))
                    break;
                chance *= rate_of(index, slot, is_store, length + depth);
                if (chance < least_chances[row]) break;
                proposed[total + depth] =
                    is_store ? token_at(index->store, place + 1 + depth) : tokens[place + 1 + depth % period];
                chances[total + depth] = chance;
            }
        }
        lengths[row] = depth;
        total += depth;
    }
    return total;
}
