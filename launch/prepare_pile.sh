#!/usr/bin/env bash
# Prepares the training text of the published models, which configs/calm_*.py and configs/ar_*.py read.
#
#   launch/prepare_pile.sh --pile=DIR --tokenizer=tokenizer.model --validation=wikitext.jsonl [--output=prepared] [--dry_run]
#       [flags of python -m calm_jax.data.prepare: --workers=N, --scheduler=ADDRESS, ...]
#
# Needs: pip install -c constraints.txt -e '.[data]'; the 30 training files of the Pile without its copyrighted parts (00.jsonl.zst to
# 29.jsonl.zst, monology/pile-uncopyrighted on the Hugging Face hub: some 350 GB) in DIR; Llama 3's tokenizer.model and
# WikiText-103's test articles, one object with the field "text" a line, which are llama3_tokenizer/tokenizer.model and
# data/wikitext_document_level-test.json of the published code (github.com/shaochenze/calm).
# DIR may be remote, such as hf://datasets/monology/pile-uncopyrighted/train (pip install huggingface_hub); every file is read at
# least twice, and more often with many workers.
# Costs: 1.2 TB of disk and some 60 core hours for CALM's text (about 300 billion tokens of 4 bytes, 1.5 million a second and core), and
# as much again for the baseline's. By default both are made; --parts=autoencoder,lm leaves the baseline's out.
# After an interruption, the same command resumes.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pile="" tokenizer="" validation="" output=prepared parts=autoencoder,lm,ar rest=()
for flag in "$@"; do
    case $flag in
        --pile=*) pile=${flag#*=} ;;
        --tokenizer=*) tokenizer=${flag#*=} ;;
        --validation=*) validation=${flag#*=} ;;
        --output=*) output=${flag#*=} ;;
        --parts=*) parts=${flag#*=} ;;
        --dry_run) dry_run=1 ;;
        *) rest+=("$flag") ;;
    esac
done
if [[ -z $pile || -z $tokenizer || -z $validation ]]; then
    fail "give --pile=DIR, --tokenizer=FILE and --validation=FILE"
fi
need_local --output "$output"
for part in ${parts//,/ }; do
    if [[ ! $part =~ ^(autoencoder|lm|ar)$ ]]; then
        fail "--parts=$parts: '$part' is none of autoencoder, lm, ar"
    fi
done
[[ -n ${parts//,/} ]] || fail "--parts=$parts names none of autoencoder, lm, ar"
if [[ $pile == *,* ]]; then
    fail "--pile=$pile must have no comma in its name"
fi

check_inputs() {
    local file number first=0 last=29
    for file in "$tokenizer" "$validation"; do
        [[ -f $file ]] || fail "there is no file $file"
    done
    head -n 1 "$validation" | grep -q '"text"' || fail "--validation=$validation: its first line has no field \"text\""
    [[ $parts != autoencoder ]] || last=1
    [[ $parts != lm ]] || first=2
    [[ $pile != *://* ]] || return 0
    for number in $(seq -f %02g $first $last); do
        [[ -f $pile/$number.jsonl.zst ]] || fail "there is no $pile/$number.jsonl.zst"
    done
}

if ((dry_run)); then
    note "not checked: whether $pile, $tokenizer and $validation are there"
else
    check_inputs
fi

# The validation text comes before the long work, and by mv, so that no partial file is left under its name.
run mkdir -p "$output"
run install -m 644 "$validation" "$output/wikitext.jsonl.tmp"
run mv "$output/wikitext.jsonl.tmp" "$output/wikitext.jsonl"

# prepare PART FILES [FLAGS that say how its documents become blocks]
prepare() {
    local part=$1 files=$2
    shift 2
    [[ ,$parts, == *,$part,* ]] || return 0
    attend python -m calm_jax.data.prepare --input="$files" --tokenizer="$tokenizer" --output="$output/pile/$part" \
        --max_words=10000 --packing=published "$@" ${rest[@]+"${rest[@]}"}
    ((!status)) || exit "$status"
}

prepare autoencoder "$pile/0[01].jsonl.zst" --block_tokens=2048 --append_eos --align_documents_to_chunks --chunk_size=4
prepare lm "$pile/0[2-9].jsonl.zst,$pile/[12][0-9].jsonl.zst" --block_tokens=8192 --noappend_eos
prepare ar "$pile/[012][0-9].jsonl.zst" --block_tokens=2048 --noappend_eos

if [[ ! $output -ef $root/prepared ]] && ((!dry_run)); then
    echo "the recipes read prepared/ of the checkout: give them --config.data.train_files=$output/pile/lm and so on, or make that prepared/ a link to $output" >&2
fi
