/**
 * Shapes that more than one module of the page uses. Types only: nothing here runs.
 *
 * @typedef {'none'|'loading'|'ready'|'lost'|'failed'} EngineStatus
 * @typedef {'streaming'|'finished'|'stopped'|'length'|'context-full'|'interrupted'|'failed'} AnswerStatus
 *
 * One entry of `GET /api/models`. Sizes in bytes; `bytes` is the whole download.
 * @typedef {object} Model
 * @property {string} id
 * @property {string} url
 * @property {string} name
 * @property {string|null} description
 * @property {string} family
 * @property {string|null} license
 * @property {number} parameters
 * @property {number} bytes
 * @property {number} resident_bytes
 * @property {{layers: number, kv_heads: number, head_dim: number}} kv
 * @property {number} context
 * @property {string} activations
 * @property {number} bits_per_weight
 * @property {number|null} ternary_bits_per_weight
 * @property {string|null} grade
 * @property {About|null} about
 * @property {boolean} default
 *
 * What a model was made from: the pack's card, packer/card.py. Losses in nats a token.
 * @typedef {object} About
 * @property {string} trained_on
 * @property {number} [tokens]
 * @property {{text: string, loss: number, tokens?: number}[]} held_out
 * @property {{prompt: string, answer: string}[]} samples
 * @property {string} [sampling]
 * @property {string} [notes]
 *
 * @typedef {object} Adapter
 * @property {string} vendor
 * @property {string} architecture
 * @property {string} device
 * @property {string} description
 * @property {boolean} [software]  a program on the processor
 *
 * @typedef {object} Support
 * @property {boolean} webgpu
 * @property {string|null} code
 * @property {string|null} message
 * @property {Adapter|null} adapter
 * @property {Record<string, number>|null} limits
 * @property {string[]} features
 *
 * @typedef {object} PlanProblem
 * @property {string} code
 * @property {string} message
 * @property {number} [needed]
 * @property {number} [available]
 *
 * What a model would need on this device. Sizes in bytes.
 * @typedef {object} Plan
 * @property {string} name
 * @property {number} downloadBytes
 * @property {number} storedBytes
 * @property {number} weightsBytes
 * @property {number} kvBytes
 * @property {number} kvBytesPerToken
 * @property {number} workBytes
 * @property {number} totalBytes
 * @property {number} contextLength
 * @property {number} maxContextLength
 * @property {boolean} fits
 * @property {PlanProblem[]} problems
 *
 * What a context was lowered to, because the one that was chosen does not fit this device.
 * @typedef {object} Lowered
 * @property {number} asked  tokens
 * @property {number} contextLength  tokens, the largest that fits
 * @property {number} totalBytes  with that context
 * @property {string} reason  why the one that was asked for does not fit
 *
 * @typedef {object} PlanState
 * @property {number} asked  tokens that this was planned for
 * @property {string} kvCache
 * @property {Plan|null} plan  at the lowered context, where there is one
 * @property {Lowered|null} lowered
 * @property {Problem|null} problem
 *
 * Any failure, as plain data that a view can show.
 * @typedef {object} Problem
 * @property {string} code
 * @property {string} message
 * @property {string} action
 * @property {Record<string, unknown>} detail
 *
 * @typedef {object} Info
 * @property {string} url
 * @property {string} name
 * @property {string|null} license
 * @property {number} parameters
 * @property {number} contextLength
 * @property {number} maxContextLength
 * @property {string} kvCache
 * @property {string} activations
 * @property {number} weightsBytes
 * @property {number} kvBytes
 * @property {number} workBytes
 * @property {number} bitsPerWeight
 * @property {string|null} grade
 * @property {Adapter|null} adapter
 * @property {string[]} kernels
 * @property {Tuning} tuning
 *
 * How kernels were chosen: constants by kind of operation; kinds that an earlier load chose, and that this one timed.
 * @typedef {{kernels: Record<string, Record<string, number>>, remembered: number, timed: number, measureMs: number,
 *   compileMs: number}} Tuning
 *
 * @typedef {'plan'|'download'|'expand'|'compile'|'check'|'ready'} Phase
 *
 * @typedef {object} ProgressEvent
 * @property {Phase} phase
 * @property {number} loaded
 * @property {number} total
 * @property {'bytes'|'tensors'|'kernels'} unit
 * @property {number} [bytesPerSecond]
 * @property {number} [secondsLeft]
 * @property {number} [stored]
 *
 * @typedef {object} Progress
 * @property {Partial<Record<Phase, ProgressEvent>>} phases
 * @property {Partial<Record<Phase, number>>} startedAt  ms since the load began
 * @property {Phase} current
 * @property {number} fraction  0 to 1, never falls
 *
 * @typedef {object} EngineState
 * @property {EngineStatus} status
 * @property {string|null} modelId
 * @property {Info|null} info
 * @property {Progress|null} progress
 * @property {Problem|null} problem
 * @property {number|null} proposedContext  tokens; set when memory was the cause
 * @property {Lowered|null} lowered  when the model has a smaller context than was chosen
 * @property {Record<string, number>|null} loadMs  when each phase of the last load began, in ms
 *
 * @typedef {object} Settings
 * @property {'auto'|'light'|'dark'} theme
 * @property {string} systemPrompt
 * @property {number} temperature
 * @property {number} topP
 * @property {number} topK
 * @property {number} minP
 * @property {number} repetitionPenalty
 * @property {number|null} seed  null: a new one for each answer
 * @property {number|null} maxTokens  null: until the model stops or the context ends
 * @property {number} contextLength
 * @property {'f16'|'f32'|'q8'} kvCache
 * @property {'stop'|'roll'} contextFull  what an answer does when the context is full
 * @property {'auto'|'off'} speculation
 *
 * How an answer came to be: enough to make it again.
 * @typedef {object} Made
 * @property {string} model
 * @property {number} contextLength
 * @property {string} kvCache
 * @property {string} systemPrompt
 * @property {number} temperature
 * @property {number} topP
 * @property {number} topK
 * @property {number} minP
 * @property {number} repetitionPenalty
 * @property {number|null} maxTokens
 * @property {number} seed
 * @property {number} [rolls]  how often the oldest text left the context meanwhile
 * @property {Usage|null} usage
 *
 * @typedef {object} Usage
 * @property {number} prompt_tokens
 * @property {number} completion_tokens
 * @property {number} total_tokens
 * @property {number} cached_tokens
 * @property {number} prefill_tokens_per_second
 * @property {number} decode_tokens_per_second
 * @property {number} time_to_first_token  seconds
 *
 * One piece of a streamed answer, as the engine sends it.
 * @typedef {object} Chunk
 * @property {{delta: {content?: string}, finish_reason: string|null}[]} choices
 * @property {Usage} [usage]  last chunk
 * @property {{seed?: number, context_used?: number, context_full?: boolean, context_rolls?: number}} [tercet]
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {'user'|'assistant'} role
 * @property {string} content
 * @property {boolean} [dropped]  no longer sent to the model
 * @property {number} [unread]  answers only: characters of its beginning that are no longer sent to the model
 * @property {AnswerStatus} [status]  answers only
 * @property {Made} [made]  answers only
 *
 * @typedef {object} Conversation
 * @property {Message[]} messages
 * @property {string} draft  what is typed and not yet sent
 *
 * The answer being written.
 * @typedef {object} Turn
 * @property {string} answerId
 * @property {'reading'|'answering'} phase
 * @property {number} from  characters that the answer had already, when it goes on
 * @property {number} rolls  how often the oldest text has left the context
 * @property {number} promptTokens
 * @property {number} tokens
 * @property {number|null} tokensPerSecond
 *
 * @typedef {object} ContextUse
 * @property {number} used  tokens of the prompt as it would be sent, with the draft
 *
 * One measurement, as engine.measure gives it: per second, in bytes, in seconds.
 * @typedef {object} MeasureReport
 * @property {string} date
 * @property {Adapter|null} adapter
 * @property {{name: string, parameters: number, contextLength: number, kvCache: string, activations: string}} model
 * @property {{bytesPerSecond: number, bufferBytes: number}} bandwidth
 * @property {{name: string, rows: number, columns: number, encoding: string, bytes: number, seconds: number,
 *   share: number}[]} linears
 * @property {{context: number, tokensPerSecond: number}[]} decode
 * @property {{tokens: number, tokensPerSecond: number}[]} prefill
 * @property {number} firstTokenSeconds
 * @property {number} loadSeconds
 * @property {number} dispatchesPerToken
 * @property {number} dispatchesPerLayer
 * @property {number} cpuMsPerToken
 * @property {{bytesPerToken: number, tokensPerSecond: number, ratio: number}} limit
 * @property {Record<string, Record<string, number>>} [kernels]  of reports that have it: constants by kind of operation
 *
 * @typedef {{done: number, total: number, label: string}} MeasureProgress
 *
 * @typedef {object} MeasureState
 * @property {'none'|'running'|'done'|'stopped'|'failed'} status
 * @property {MeasureProgress|null} progress
 * @property {MeasureReport|null} report
 * @property {Problem|null} problem
 *
 * @typedef {object} State
 * @property {string} version
 * @property {Settings} settings
 * @property {boolean} canStore  whether the browser lets the page keep things
 * @property {Support|null} support
 * @property {{status: 'loading'|'ready'|'failed', list: Model[], problem: Problem|null}} models
 * @property {Record<string, PlanState>} plans
 * @property {'choose'|'chat'} screen
 * @property {EngineState} engine
 * @property {Conversation} conversation
 * @property {Message[]|null} previous  the chat that "new chat" put away
 * @property {Turn|null} turn
 * @property {Problem|null} trouble  why the last answer did not come
 * @property {ContextUse} context
 * @property {string|null} editing  id of the message being edited
 * @property {'settings'|'details'|'speed'|null} panel
 * @property {MeasureState} measure
 * @property {string|null} kernels  kernels that the page's address forces, for debugging
 * @property {Problem|null} lastProblem  for the bug report
 *
 * @typedef {ReturnType<typeof import('./store.js').createStore<State>>} Store
 */
export {};
